"""The product of the four parts: filling, appending, attending. `kvlab.core` says what the parts are."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import reading
from kvlab.attention import AttentionSpec
from kvlab.core import EMPTY, NEEDS, PAGE, Cache, Codec, Layout, Record, Retention, Selection, part
from kvlab.errors import RefusedPolicy


class Attended(NamedTuple):
    out_BHQD: Any
    lse_BHQ: Any
    info: reading.Info
    cache: Cache
    shared: Any = None


@part
class Policy:
    """Retention × codec × layout × selection; raises `RefusedPolicy` with the reason and the ways out."""

    retention: Any
    codec: Any
    layout: Any
    selection: Any

    def __post_init__(self):
        kinds = (self.retention, Retention), (self.codec, Codec), (self.layout, Layout), (self.selection, Selection)
        if all(isinstance(x, kind) for x, kind in kinds):  # jax also rebuilds policies around placeholders
            for reason in self.conflicts():
                raise RefusedPolicy(reason)

    def conflicts(self):
        """The reasons why these four cannot work together, as sentences."""
        keep, group = self.retention, self.group
        if keep.unit not in (None, 1, PAGE):
            yield f"{keep} has unit={keep.unit}; allowed: None, 1 or {PAGE}"
        if keep.evicts and keep.unit == 1 and group > 1:
            yield (
                f"{keep} replaces single tokens, but {self.codec} shares one scale among the {group} tokens of a page; "
                f"let the retention evict pages (unit={PAGE}) or give the codec a scale per token"
            )
        if keep.evicts and keep.unit == 1 and self.layout.whole_pages:
            yield (
                f"{keep} replaces single tokens, but pages of {self.layout} are immutable once written; "
                f"let the retention evict pages (unit={PAGE}) or use the contiguous layout"
            )
        if keep.evicts and self.selection.by_position:
            yield (
                f"{self.selection} passes slots from layer to layer, but {keep} moves tokens to other slots in each; "
                "use a retention that keeps all, or a selection of the layer's own"
            )
        if unknown := set(keep.needs) - set(NEEDS):
            yield f"{keep} needs {sorted(unknown)}; allowed: {', '.join(NEEDS)}"

    def at(self, layer: int, model) -> "Policy":
        """The policy for one layer of a model (`ModelConfig`), for parts that differ by layer; idempotent."""
        dim = model.head_dim
        per_token = (self.codec.keys.page_bytes(dim) + self.codec.values.page_bytes(dim)) / PAGE
        keep, select = self.retention.at(layer, model), self.selection.at(layer, model, per_token)
        if keep is self.retention and select is self.selection:
            return self
        return dataclasses.replace(self, retention=keep, selection=select)

    def for_rows(self, index) -> "Policy":
        """The policy for the named rows of a batch."""
        return dataclasses.replace(self, selection=self.selection.rows(index))

    @property
    def group(self) -> int:
        return max(self.codec.keys.group, self.codec.values.group)

    @property
    def unit(self) -> int:
        """Tokens placed and evicted together."""
        return max(self.retention.unit or 1, self.group, PAGE if self.layout.whole_pages else 1)

    @property
    def tailed(self) -> bool:
        """Whether the codes of the open page wait in a raw tail."""
        return self.group > 1 or self.layout.whole_pages

    def budget(self, prompt: int, total: int) -> int:
        """Tokens that a cache holds, in whole units."""
        want = min(self.retention.budget(prompt, total, self.unit), total)
        return -(-max(want, 1) // self.unit) * self.unit

    # ------------------------------------------------------------------------------------------------------- filling

    def fill(self, record: Record, budget: int) -> Cache:
        """A cache of `budget` tokens (see `budget`) from a prompt's record, which is left as it was.

        Kept tokens lie in order of position. Where the policy does not evict, a prompt longer than the budget loses its
        lowest priorities here once.
        """
        B, H, T, D = record.key_BHTD.shape
        N = -(-budget // PAGE)
        seen = {name: record.seen[name] for name in self.retention.needs}
        score = self.retention.score(record.key_BHTD, record.value_BHTD, record.pos_BT[:, None], **seen)
        index, ok = self._keep(record, score, budget, N * PAGE)
        safe = jnp.where(ok, index, 0)

        def gather(x):
            got = jnp.take_along_axis(x, safe.reshape(safe.shape + (1,) * (x.ndim - 3)), 2)
            mask = ok.reshape(ok.shape + (1,) * (x.ndim - 3))
            return jnp.where(mask, got, jnp.zeros((), x.dtype)).reshape(B, H, N, PAGE, *x.shape[3:])

        key, value = gather(record.key_BHTD), gather(record.value_BHTD)
        pos_BHT = jnp.broadcast_to(record.pos_BT[:, None], (B, H, T)).astype(jnp.int32)
        pos = jnp.where(ok.reshape(B, H, N, PAGE), gather(pos_BHT), EMPTY)
        count = ok.sum(-1, dtype=jnp.int32)
        open_, offset = jnp.maximum(count - 1, 0) // PAGE, (count - 1) % PAGE + 1
        tail: tuple = ()
        if self.tailed:
            tail = tuple(jnp.take_along_axis(x, open_[..., None, None, None], 2)[:, :, 0] for x in (key, value))
        memory = self.layout.pack(self._encode(key, value))
        now = record.pos_BT.max(-1)[:, None]
        lost = jnp.where(count < (record.pos_BT >= 0).sum(-1)[:, None], now, EMPTY).astype(jnp.int32)
        return Cache(
            pos, -(-count // self.unit), open_, offset, lost, memory, tail,
            jax.tree.map(gather, score), self.selection.start(key, pos), budget,
        )  # fmt: skip

    def _encode(self, key, value):
        return {"k": self.codec.keys.encode(key), "v": self.codec.values.encode(value)}

    def _keep(self, record: Record, score, budget: int, slots: int):
        """Indices into T of the tokens kept, in order, padded to `slots`; and which are real."""
        B, H, T, _ = record.key_BHTD.shape
        pos = jnp.broadcast_to(record.pos_BT[:, None], (B, H, T))
        now = record.pos_BT.max(-1)[:, None, None]
        priority = jnp.broadcast_to(self.retention.priority(score, pos, now), pos.shape).astype(jnp.float32)
        priority = jnp.where(pos >= 0, priority, -jnp.inf)
        if self.unit > 1 and self.retention.aligned:
            page = self._pool(priority.reshape(B, H, -1, PAGE), pos.reshape(B, H, -1, PAGE))
            page = jnp.where(jnp.arange(T // PAGE) == now // PAGE, jnp.inf, page)  # the page still open stays
            rank = self._rank(page, pos.reshape(B, H, -1, PAGE).max(-1))
            keep = (rank < budget // PAGE) & (page > -jnp.inf)
            keep = jnp.repeat(keep, PAGE, -1) & (pos >= 0)
        else:
            keep = (self._rank(priority, pos) < budget) & (priority > -jnp.inf)
        index = jnp.sort(jnp.where(keep, jnp.arange(T), T), -1)[..., :slots]
        index = jnp.pad(index, ((0, 0), (0, 0), (0, max(slots - T, 0))), constant_values=T)
        return index, index < T

    @staticmethod
    def _rank(priority, pos):
        """Rank of each entry, 0 for the highest priority; among equals the newest is first."""
        order = jnp.lexsort((pos, priority), axis=-1)[..., ::-1]
        return jnp.argsort(order, -1)

    def _pool(self, priority_BHNP, pos_BHNP):
        """Priorities of pages from those of their tokens; an empty page has −inf."""
        live = pos_BHNP >= 0
        if self.retention.pool == "max":
            return jnp.where(live, priority_BHNP, -jnp.inf).max(-1)
        total, count = jnp.where(live, priority_BHNP, 0.0).sum(-1), live.sum(-1)
        return jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)

    # ----------------------------------------------------------------------------------------------------- appending

    def append(self, cache: Cache, key_BHD, value_BHD, pos_B, live_B=None, seen=None) -> Cache:
        """Places one token per row at its true position, evicting if need be. Rows that are not `live` stay as they were.

        Never reads codes, so within one jit it must come before `attend`: XLA then updates the cache in place. `seen` holds
        what the retention needs, `[B, 1 or H, ...]`.
        """
        N = cache.pos.shape[2]
        live = jnp.ones(cache.opened.shape, bool) if live_B is None else jnp.broadcast_to(live_B[:, None], cache.opened.shape)
        page, offset, fresh, evicts = self._place(cache, pos_B, live)
        page = jnp.where(live, page, N)  # out of range: dropped
        row, head = _index(page)
        cleared = jnp.where(fresh & (self.unit > 1), page, N)
        alone = fresh if self.unit > 1 else (cache.pos[row, head, jnp.minimum(page, N - 1)] < 0).all(-1)
        pos = cache.pos.at[row, head, cleared].set(EMPTY, mode="drop")
        pos = pos.at[row, head, page, offset].set(jnp.broadcast_to(pos_B[:, None], page.shape), mode="drop")
        tail, memory = self._store(cache, page, offset, key_BHD, value_BHD)
        needed = {name: seen[name][:, :, None] for name in self.retention.needs}
        score = self.retention.score(key_BHD[:, :, None], value_BHD[:, :, None], pos_B[:, None, None], **needed)
        put = lambda old, new: old.at[row, head, page, offset].set(new[:, :, 0], mode="drop")
        return Cache(
            pos,
            jnp.minimum(cache.opened + fresh, cache.budget // self.unit),
            jnp.where(live, page, cache.open),
            jnp.where(live, offset + 1, cache.offset),
            jnp.where(evicts, pos_B[:, None], cache.lost),
            memory, tail,
            jax.tree.map(put, cache.retained, score),
            self.selection.write(cache.index, page, offset, key_BHD, pos_B, alone), cache.budget,
        )  # fmt: skip

    def _place(self, cache: Cache, pos_B, live):
        """Page and offset for the next token, whether it opens a new unit, and whether another one goes for it."""
        fresh = live & (cache.offset == PAGE) if self.unit > 1 else live
        unit, evicts = cache.opened, jnp.zeros_like(fresh)
        if self.retention.evicts:
            evicts = fresh & (cache.opened >= cache.budget // self.unit)
            unit = lax.cond(evicts.any(), lambda: jnp.where(evicts, self._victim(cache, pos_B), unit), lambda: unit)
        if self.unit > 1:
            return jnp.where(fresh, unit, cache.open), jnp.where(fresh, 0, cache.offset), fresh, evicts
        return unit // PAGE, unit % PAGE, fresh, evicts

    def _victim(self, cache: Cache, pos_B):
        """The unit of lowest priority; among equals the oldest."""
        B, H, N, _ = cache.pos.shape
        flat = lambda x: x.reshape(B, H, N * PAGE, *x.shape[4:])
        pos = flat(cache.pos)
        priority = self.retention.priority(jax.tree.map(flat, cache.retained), pos, pos_B[:, None, None])
        priority = jnp.broadcast_to(priority, pos.shape).astype(jnp.float32)
        if self.unit > 1:
            priority = self._pool(priority.reshape(cache.pos.shape), cache.pos)
            pos = cache.pos.max(-1)
        else:
            priority = jnp.where(pos >= 0, priority, -jnp.inf)[..., : cache.budget]
            pos = pos[..., : cache.budget]
        lowest = priority == priority.min(-1, keepdims=True)
        return jnp.argmin(jnp.where(lowest, pos, jnp.iinfo(jnp.int32).max), -1).astype(jnp.int32)

    def _store(self, cache: Cache, page, offset, key_BHD, value_BHD):
        """The new token's codes: into memory at once, or into the tail, which is committed when its page is full."""
        if not self.tailed:
            code = self._encode(key_BHD[:, :, None, None], value_BHD[:, :, None, None])
            return (), self.layout.write(cache.memory, page, offset, code)
        N = cache.pos.shape[2]
        row, head = _index(page)
        at = jnp.where(page < N, offset, PAGE)
        tail = tuple(x.at[row, head, at].set(y, mode="drop") for x, y in zip(cache.tail, (key_BHD, value_BHD)))
        full = (page < N) & (offset == PAGE - 1)
        commit = lambda m: self.layout.write(m, jnp.where(full, page, N), None, self._encode(*(x[:, :, None] for x in tail)))
        return tail, lax.cond(full.any(), commit, lambda m: m, cache.memory)

    # ----------------------------------------------------------------------------------------------------- attending

    def attend(self, cache: Cache, query_BHQD, pos_B, spec: AttentionSpec, shared=None) -> Attended:
        """Attention of one token's queries (Q = G query heads of a KV head) at positions `pos_B` over the cache.

        A row with nothing to read gives output 0, lse −inf and gradient 0. `shared` is what the layers before passed on.
        """
        out, lse, info, shared = reading.token(self, cache, query_BHQD, pos_B, spec, shared)
        return Attended(out, lse, info, cache, shared)

    def extend(self, cache: Cache, query_BTHGD, key_BHTD, value_BHTD, pos_BT, spec: AttentionSpec, seen=None):
        """A chunk of a prompt: its attention over the cache and over itself `[B, T, H, G, D]`, then the cache that holds it too.

        What feeding the tokens one by one gives (positions EMPTY are pads, on the right), except that a chunk reads all
        that is stored, whatever the selection, and its own tokens before the codec rounds them or the retention drops them.
        """
        out = reading.chunk(self, cache, query_BTHGD, key_BHTD, value_BHTD, pos_BT, spec)
        # written only after the old cache was read, or XLA keeps a copy of it: a zero that it cannot see to be one
        total = out.sum()
        zero = 0.0 * jnp.where(jnp.isfinite(total), total, 0.0)
        key, value = key_BHTD + zero, value_BHTD + zero

        def step(t, cache):
            pos = pos_BT[:, t]
            return self.append(
                cache, key[:, :, t], value[:, :, t], pos, pos >= 0, {n: x[:, :, t] for n, x in (seen or {}).items()}
            )

        return out, lax.fori_loop(0, pos_BT.shape[1], step, cache)

    # ------------------------------------------------------------------------------------------------- rows and lengths

    def rows(self, cache: Cache, index) -> Cache:
        """The caches of the named rows, in that order: forks a row when it is named twice."""
        return jax.tree.map(lambda x: x[index], cache)

    def truncate(self, cache: Cache, length_B) -> Cache:
        """Forgets the tokens at positions ≥ length. Only for lengths above `Cache.lost`: what was dropped does not return.

        A committed page that is cut midway keeps its codes; its lost slots are empty and the next token opens a new page.
        """
        pos = jnp.where(cache.pos >= length_B[:, None, None, None], EMPTY, cache.pos)
        held = (pos >= 0).sum(-1, dtype=jnp.int32)
        if self.unit == 1:
            return dataclasses.replace(cache, pos=pos, opened=held.sum(-1))
        left = jnp.take_along_axis(held, cache.open[..., None], 2)[..., 0]
        offset = jnp.where((cache.offset < PAGE) & (left > 0), left, PAGE)
        return dataclasses.replace(cache, pos=pos, opened=(held > 0).sum(-1, dtype=jnp.int32), offset=offset)

    def room(self, cache: Cache):
        """Tokens that each row can still take, `[B, H]`; a cache that evicts has always room."""
        if self.retention.evicts:
            return jnp.full(cache.opened.shape, jnp.iinfo(jnp.int32).max)
        units = cache.budget // self.unit - cache.opened
        return units * self.unit + (PAGE - cache.offset if self.unit > 1 else 0)


def _index(x):
    """Broadcast indices of rows and heads for an array `[B, H, ...]` of page or slot numbers."""
    grid = jnp.indices(x.shape[:2], sparse=True)
    return tuple(i.reshape(i.shape + (1,) * (x.ndim - 2)) for i in grid)
