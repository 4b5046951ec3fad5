"""The product of the four parts: filling, appending, attending. `kvlab.core` says what the parts are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import attention
from kvlab.attention import AttentionSpec, Partial
from kvlab.core import BLOCK, EMPTY, PAGE, Cache, Codec, Layout, Record, Retention, Selection, Tokens, part
from kvlab.errors import RefusedPolicy


class Info(NamedTuple):
    """Diagnostics of one attention: entropy of each query head (nats) and tokens read per KV head. Unused ones cost nothing."""

    entropy_BHQ: Any
    reads_BH: Any


class Attended(NamedTuple):
    out_BHQD: Any
    lse_BHQ: Any
    info: Info
    cache: Cache


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
        score = self.retention.score(record.key_BHTD, record.value_BHTD, record.pos_BT[:, None])
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
        return Cache(
            pos, -(-count // self.unit), open_, offset, memory, tail,
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

    def append(self, cache: Cache, key_BHD, value_BHD, pos_B, live_B=None) -> Cache:
        """Places one token per row at its true position, evicting if need be. Rows that are not `live` stay as they were.

        Never reads codes, so within one jit it must come before `attend`: XLA then updates the cache in place.
        """
        N = cache.pos.shape[2]
        live = jnp.ones(cache.opened.shape, bool) if live_B is None else jnp.broadcast_to(live_B[:, None], cache.opened.shape)
        page, offset, fresh = self._place(cache, pos_B, live)
        page = jnp.where(live, page, N)  # out of range: dropped
        row, head = _index(page)
        cleared = jnp.where(fresh & (self.unit > 1), page, N)
        pos = cache.pos.at[row, head, cleared].set(EMPTY, mode="drop")
        pos = pos.at[row, head, page, offset].set(jnp.broadcast_to(pos_B[:, None], page.shape), mode="drop")
        tail, memory = self._store(cache, page, offset, key_BHD, value_BHD)
        score = self.retention.score(key_BHD[:, :, None], value_BHD[:, :, None], pos_B[:, None, None])
        put = lambda old, new: old.at[row, head, page, offset].set(new[:, :, 0], mode="drop")
        return Cache(
            pos,
            jnp.minimum(cache.opened + fresh, cache.budget // self.unit),
            jnp.where(live, page, cache.open),
            jnp.where(live, offset + 1, cache.offset),
            memory, tail,
            jax.tree.map(put, cache.retained, score),
            self.selection.write(cache.index, page, offset, key_BHD, fresh), cache.budget,
        )  # fmt: skip

    def _place(self, cache: Cache, pos_B, live):
        """Page and offset for the next token, and whether it opens a new unit."""
        fresh = live & (cache.offset == PAGE) if self.unit > 1 else live
        unit = cache.opened
        if self.retention.evicts:
            full = cache.opened >= cache.budget // self.unit
            victim = lax.cond((fresh & full).any(), lambda: self._victim(cache, pos_B), lambda: cache.opened)
            unit = jnp.where(full, victim, unit)
        if self.unit > 1:
            return jnp.where(fresh, unit, cache.open), jnp.where(fresh, 0, cache.offset), fresh
        return unit // PAGE, unit % PAGE, fresh

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

    def attend(self, cache: Cache, query_BHQD, pos_B, spec: AttentionSpec) -> Attended:
        """Attention of one token's queries (Q = G query heads of a KV head) at positions `pos_B` over the cache.

        A row with nothing to read gives output 0, lse −inf and gradient 0.
        """
        now = pos_B[:, None, None, None]
        query = query_BHQD * spec.scale
        rule = self.retention.visibility()
        sees = lambda pos: spec.sees(pos, now) & rule.mask(pos, now)
        if self.selection.reads_all:
            done, reads = self._read_all(cache, query, sees, spec)
            tail_ok = jnp.ones((), bool)
        else:
            visible = sees(cache.pos)
            picked = self.selection.select(cache.index, query, visible, cache)
            done, reads, tail_ok = self._read_some(cache, query, visible, picked, spec)
        if self.tailed:
            new = self._read_tail(cache, query, sees, tail_ok, spec)
            done = attention.merge(done, new)
        out, lse, entropy = attention.finish(done)
        return Attended(out, lse, Info(entropy, reads), cache)

    @staticmethod
    def _nothing(query) -> Partial:
        B, H, Q, D = query.shape
        return attention.nothing(B, H, Q, D)

    @staticmethod
    def _in_tail(cache: Cache, number):
        """Which of the pages `number` have their codes in the tail (the open one, until it is full), `[B, H, ...]`."""
        return (cache.offset < PAGE)[..., None] & (number == cache.open[..., None])

    def _partial(self, query, code, ok, spec) -> Partial:
        logits = spec.cap(self.codec.keys.scores(query, code["k"]))
        return attention.partial(logits, ok[:, :, None], lambda w: self.codec.values.mix(w, code["v"]))

    def _read_all(self, cache: Cache, query, sees, spec):
        """Every visible token: in one pass where codes are read in place and most are live, else block by block."""
        B, H, N, _ = cache.pos.shape
        empty = self._nothing(query), jnp.zeros((B, H), jnp.int32)

        def read(start, pages, floor):
            number = start + jnp.arange(pages)
            ok = sees(lax.dynamic_slice_in_dim(cache.pos, start, pages, 2))
            reads = (ok & (number >= floor)[:, None]).sum((-1, -2), dtype=jnp.int32)
            stored = number >= floor
            if self.tailed:
                stored = stored & ~self._in_tail(cache, number)
            ok = ok & stored[..., None]
            return self._partial(query, self.layout.slice(cache.memory, start, pages), ok, spec), reads

        def step(i, carry):
            done, reads = carry
            new, more = read(jnp.minimum(i * BLOCK, N - BLOCK), BLOCK, i * BLOCK)
            return attention.merge(done, new), reads + more

        in_place = self.codec.keys.in_place and self.codec.values.in_place
        if N <= (2 * BLOCK if in_place else BLOCK):
            return read(0, N, 0)
        used = jnp.minimum(-(-cache.opened.max() * self.unit // PAGE), N)
        loop = lambda: lax.fori_loop(0, -(-used // BLOCK), step, empty)
        if not in_place:
            return loop()
        return lax.cond(2 * used > N, lambda: read(0, N, 0), loop)

    def _read_some(self, cache: Cache, query, visible, picked, spec):
        """The pages or slots that a selection named, in blocks; and which tokens of the tail are among them."""
        B, H, N, _ = cache.pos.shape
        index = picked.index
        single = isinstance(picked, Tokens)
        fetch = self.layout.tokens if single else self.layout.pages
        view = visible.reshape(B, H, -1, 1) if single else visible
        stored = visible
        tail_ok = jnp.ones((), bool)
        if self.tailed:
            stored = visible & ~self._in_tail(cache, jnp.arange(N))[..., None]
            own = cache.open[..., None] * PAGE + jnp.arange(PAGE) if single else cache.open[..., None]
            tail_ok = (own[..., None] == index[:, :, None]).any(-1)
        stored = stored.reshape(view.shape)
        R = index.shape[-1]
        block = min(R, BLOCK * PAGE if single else BLOCK)
        pad = -R % block
        index = jnp.pad(index, ((0, 0), (0, 0), (0, pad)), constant_values=-1)

        def step(i, done):
            some = lax.dynamic_slice_in_dim(index, i * block, block, 2)
            safe = jnp.maximum(some, 0)
            ok = jnp.take_along_axis(stored, safe[..., None], 2) & (some >= 0)[..., None]
            return attention.merge(done, self._partial(query, fetch(cache.memory, safe), ok, spec))

        most = (index >= 0).sum(-1).max()  # ids come first, so only the densest row's blocks are walked
        done = lax.fori_loop(0, -(-most // block), step, self._nothing(query))
        got = jnp.take_along_axis(view, jnp.maximum(index, 0)[..., None], 2) & (index >= 0)[..., None]
        return done, got.sum((-1, -2), dtype=jnp.int32), tail_ok

    def _read_tail(self, cache: Cache, query, sees, tail_ok, spec) -> Partial:
        key, value = cache.tail
        pos = jnp.take_along_axis(cache.pos, cache.open[..., None, None], 2)
        ok = sees(pos)[:, :, 0] & self._in_tail(cache, cache.open[..., None]) & tail_ok
        logits = spec.cap(jnp.einsum("bhqd,bhpd->bhqp", query, key))
        mix = lambda w: jnp.einsum("bhqp,bhpd->bhqd", w[..., 0, :], value)
        return attention.partial(logits[..., None, :], ok[:, :, None, None], mix)

    # ---------------------------------------------------------------------------------------------------------- rows

    def rows(self, cache: Cache, index) -> Cache:
        """The caches of the named rows, in that order: forks a row when it is named twice."""
        return jax.tree.map(lambda x: x[index], cache)


def _index(x):
    """Broadcast indices of rows and heads for an array `[B, H, ...]` of page or slot numbers."""
    grid = jnp.indices(x.shape[:2], sparse=True)
    return tuple(i.reshape(i.shape + (1,) * (x.ndim - 2)) for i in grid)
