"""The product of the four parts: filling, appending, attending. `kvlab.core` says what the parts are."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import needs, reading, renewal
from kvlab.attention import AttentionSpec
from kvlab.core import EMPTY, PAGE, Cache, Codec, Layout, Record, Retention, Selection, part
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.slots import Even, Pooled


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
        keep = self.retention
        if keep.unit not in (None, 1, PAGE):
            yield f"{keep} has unit={keep.unit}; allowed: None, 1 or {PAGE}"
        if keep.evicts and keep.unit == 1 and self.group > 1:
            yield (
                f"{keep} replaces single tokens, but {self.codec} shares one scale among the {self.group} tokens of a page; "
                f"let the retention evict pages (unit={PAGE}) or give the codec a scale per token"
            )
        if keep.evicts and keep.unit == 1 and self.residual:
            yield (
                f"{keep} replaces single tokens, but {self.codec} keeps whole pages of the newest exact; "
                f"let the retention evict pages (unit={PAGE}) or give the codec residual=0"
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
        if keep.observes and not self.selection.reads_all:
            yield (
                f"{keep} watches the attention that every stored token gets, but {self.selection} does not read all of them; "
                "use read_all, or a retention that does not observe"
            )
        if keep.uneven and keep.unit == 1:
            yield f"{keep} gives heads unequal budgets, which come in pages, but it evicts single tokens; use unit={PAGE}"
        if keep.uneven and not self.selection.reads_all:
            yield (
                f"{keep} gives heads unequal budgets, so that their pages lie in one pool, which {self.selection} cannot "
                "read from; use read_all, or a retention with a budget that is the same for every head"
            )
        if unknown := set(keep.needs) - set(needs.ALL):
            yield f"{keep} needs {sorted(unknown)}; allowed: {', '.join(needs.ALL)}"

    def at(self, layer: int, model) -> "Policy":
        """The policy for one layer of a model (`ModelConfig`), for parts that differ by layer; idempotent."""
        dim = model.head_dim
        codec = self.codec.at(layer, model)
        per_token = (codec.keys.page_bytes(dim) + codec.values.page_bytes(dim)) / PAGE
        keep, select = self.retention.at(layer, model), self.selection.at(layer, model, per_token)
        if keep is self.retention and codec is self.codec and select is self.selection:
            return self
        return dataclasses.replace(self, retention=keep, codec=codec, selection=select)

    def for_rows(self, index) -> "Policy":
        """The policy for the named rows of a batch."""
        return dataclasses.replace(self, selection=self.selection.rows(index))

    @property
    def group(self) -> int:
        return max(self.codec.keys.group, self.codec.values.group)

    @property
    def residual(self) -> int:
        return max(self.codec.keys.residual, self.codec.values.residual)

    @property
    def tailed(self) -> bool:
        """Whether the codes of the newest pages wait in a raw tail."""
        return self.group > 1 or self.layout.whole_pages or self.residual > 0

    @property
    def unit(self) -> int:
        """Tokens placed and evicted together."""
        return PAGE if self.tailed or self.retention.uneven else self.retention.unit or 1

    @property
    def slots(self) -> Even:
        return Pooled() if self.retention.uneven else Even()

    @property
    def waits(self) -> int:
        """Pages that wait to be full: the open one, and as many as keep `residual` tokens exact when one was just opened."""
        return 1 - -self.residual // PAGE if self.unit > 1 else 0

    def budget(self, prompt: int, total: int) -> int:
        """Tokens that a cache holds, in whole units. Errors: ConfigError where the tail would not fit."""
        want = max(min(self.retention.budget(prompt, total, self.unit), total), 1)
        if self.waits > 1 and self.retention.evicts and want < min(total, self.waits * PAGE):
            raise ConfigError(
                f"{self.retention} keeps {want} tokens, but the newest pages that {self.codec} leaves exact need "
                f"{self.waits * PAGE}; keep as many or ask for a smaller residual"
            )
        return -(-want // self.unit) * self.unit

    # ------------------------------------------------------------------------------------------------------- filling

    def fill(self, record: Record, budget: int, pages: int | None = None) -> Cache:
        """A cache of `budget` tokens (see `budget`) from a prompt's record, which is left as it was.

        Kept tokens lie in order of position. Where the policy does not evict, a prompt longer than the budget loses its
        lowest priorities here once. Where heads get unequal budgets, `budget` is their mean and `pages` how many all heads of
        a row have together, at least what `pages` says; by default enough for any.
        """
        B, H, T, _ = record.key_BHTD.shape
        N = -(-budget // PAGE)
        seen = self._seen(record, budget)
        score, keep, quota = self._keep(record, budget)
        most = H * N + 2 * H if pages is None else pages
        source, bounds = self.slots.sources(keep, most if self.slots.pooled else N, quota)

        def gather(x):
            x = x.reshape(B, H * T, *x.shape[3:])
            flat = source.reshape(B, -1, *(1,) * (x.ndim - 2))
            got = jnp.where(flat >= 0, jnp.take_along_axis(x, jnp.maximum(flat, 0), 1), jnp.zeros((), x.dtype))
            return got.reshape(*source.shape, *x.shape[2:])

        key, value = gather(record.key_BHTD), gather(record.value_BHTD)
        pos_BHT = jnp.broadcast_to(record.pos_BT[:, None], (B, H, T)).astype(jnp.int32)
        pos = jnp.where(source >= 0, gather(pos_BHT), EMPTY)
        count = keep.sum(-1, dtype=jnp.int32)
        waiting, offset = self._waiting(count, bounds[:, :-1, None] if self.slots.pooled else 0)
        tail = tuple(self.slots.pages(x, waiting) for x in (key, value)) if self.tailed else ()
        memory = self.layout.pack(self._encode(key, value, pos), self._held(pos, waiting))
        kept, carried = (), {}
        if self.retention.renews:
            carried = {name: seen[name] for name in needs.CARRIED & seen.keys()}
        else:
            kept = jax.tree.map(gather, score)
        now = record.pos_BT.max(-1)[:, None]
        lost = jnp.where(count < (record.pos_BT >= 0).sum(-1)[:, None], now, EMPTY).astype(jnp.int32)
        return Cache(
            pos, -(-count // self.unit), waiting, offset, lost, memory, tail,
            kept, carried, self.selection.start(key, pos), bounds, budget,
        )  # fmt: skip

    def pages(self, record: Record, budget: int) -> jax.Array:
        """Pages that all heads of each row need together, `[B]`; for `fill` where heads get unequal budgets."""
        return self._keep(record, budget)[2].sum(-1)

    def _seen(self, record: Record, budget: int) -> dict[str, Any]:
        seen = {"budget": budget, **record.seen}
        return {name: seen[name] for name in self.retention.needs}

    def _waiting(self, count_BH, first):
        """The pages in the tail of a cache that holds `count` tokens in order, and how many tokens the open one has."""
        last, offset = (count_BH - 1) // PAGE, (count_BH - 1) % PAGE + 1
        open_ = jnp.where(offset < PAGE, last, last + 1)
        number = open_[..., None] + jnp.arange(1 - self.waits, 1)
        return jnp.where((number >= 0) & (number <= last[..., None]), number + first, EMPTY).astype(jnp.int32), offset

    def _held(self, pos, waiting):
        """Pages whose codes are needed, `[B, H, N]`: they hold something that does not wait in the tail."""
        held = (pos >= 0).any(-1)
        if not self.tailed:
            return held
        waits = reading.in_tail(waiting, jnp.arange(held.shape[2]))
        return held & ~(waits.any(1, keepdims=True) if self.slots.pooled else waits)

    def _encode(self, key, value, pos):
        return {"k": self.codec.keys.encode(key, pos), "v": self.codec.values.encode(value, pos)}

    def _keep(self, record: Record, budget: int):
        """The retention's state, which tokens stay `[B, H, T]`, and the pages that each head is given, `[B, H]`."""
        B, H, T, _ = record.key_BHTD.shape
        seen = self._seen(record, budget)
        score = self.retention.score(record.key_BHTD, record.value_BHTD, record.pos_BT[:, None], **seen)
        pos = jnp.broadcast_to(record.pos_BT[:, None], (B, H, T))
        now = record.pos_BT.max(-1)[:, None, None]
        priority = jnp.broadcast_to(self.retention.priority(score, pos, now), pos.shape).astype(jnp.float32)
        priority = jnp.where(pos >= 0, priority, -jnp.inf)
        most = self.retention.shares(priority, pos, budget)[..., None] if self.retention.uneven else budget
        if self.unit > 1 and self.retention.aligned:
            page = self._pool(priority.reshape(B, H, -1, PAGE), pos.reshape(B, H, -1, PAGE))
            page = jnp.where(jnp.arange(T // PAGE) == now // PAGE, jnp.inf, page)  # the page still open stays
            rank = self._rank(page, pos.reshape(B, H, -1, PAGE).max(-1))
            keep = (rank < most // PAGE) & (page > -jnp.inf)
            keep = jnp.repeat(keep, PAGE, -1) & (pos >= 0)
        else:
            keep = (self._rank(priority, pos) < most) & (priority > -jnp.inf)
        least = 1 + self.waits if self.retention.evicts else 1  # so that a full page can go before the open one must
        quota = jnp.maximum(-(-jnp.broadcast_to(most, (B, H, 1))[..., 0] // PAGE), least)
        return score, keep, quota.astype(jnp.int32)

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
        row, head = self._index(page)
        cleared = jnp.where(fresh & (self.unit > 1), page, N)
        alone = fresh if self.unit > 1 else (cache.pos[row, head, jnp.minimum(page, N - 1)] < 0).all(-1)
        pos = cache.pos.at[row, head, cleared].set(EMPTY, mode="drop")
        pos = pos.at[row, head, page, offset].set(jnp.broadcast_to(pos_B[:, None], page.shape), mode="drop")
        waiting, tail, memory = self._store(cache, page, offset, key_BHD, value_BHD, pos, pos_B)
        retained = cache.retained
        if not self.retention.renews:
            given = {"budget": cache.budget, **{name: x[:, :, None] for name, x in (seen or {}).items()}}
            given = {name: given[name] for name in self.retention.needs if name in given}
            score = self.retention.fresh(key_BHD[:, :, None], value_BHD[:, :, None], pos_B[:, None, None], **given)
            put = lambda old, new: old.at[row, head, page, offset].set(new[:, :, 0], mode="drop")
            retained = jax.tree.map(put, retained, score)
        return Cache(
            pos,
            jnp.minimum(cache.opened + fresh, self.slots.quota(cache, self.unit)),
            waiting,
            jnp.where(live, offset + 1, cache.offset),
            jnp.where(evicts, pos_B[:, None], cache.lost),
            memory, tail, retained, cache.carried,
            self.selection.write(cache.index, page, offset, key_BHD, pos_B, alone),
            cache.bounds, cache.budget,
        )  # fmt: skip

    def _place(self, cache: Cache, pos_B, live):
        """Page and offset for the next token, whether it opens a new unit, and whether another one goes for it."""
        fresh = live & (cache.offset == PAGE) if self.unit > 1 else live
        unit, evicts = cache.opened + self.slots.first(cache), jnp.zeros_like(fresh)
        if self.retention.evicts:
            evicts = fresh & (cache.opened >= self.slots.quota(cache, self.unit))
            unit = lax.cond(evicts.any(), lambda: jnp.where(evicts, self._victim(cache, pos_B), unit), lambda: unit)
        if self.unit > 1:
            return jnp.where(fresh, unit, cache.waiting[..., -1]), jnp.where(fresh, 0, cache.offset), fresh, evicts
        return unit // PAGE, unit % PAGE, fresh, evicts

    def _victim(self, cache: Cache, pos_B):
        """The unit of lowest priority among a head's own; among equals the oldest."""
        flat = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])
        pos = flat(cache.pos)
        state = renewal.state(self, cache) if self.retention.renews else jax.tree.map(flat, cache.retained)
        priority = self.retention.priority(state, pos, pos_B[:, None, None])
        priority = jnp.broadcast_to(priority, pos.shape).astype(jnp.float32)
        if self.unit > 1:
            priority = self._pool(priority.reshape(cache.pos.shape), cache.pos)
            may = self.slots.owned(cache) & ~reading.in_tail(cache.waiting, jnp.arange(cache.pos.shape[2]))
            pos = cache.pos.max(-1)
        else:
            priority = jnp.where(pos >= 0, priority, -jnp.inf)
            may = jnp.arange(pos.shape[-1]) < cache.budget
        lowest = may & (priority == jnp.where(may, priority, jnp.inf).min(-1, keepdims=True))
        return jnp.argmin(jnp.where(lowest, pos, jnp.iinfo(jnp.int32).max), -1).astype(jnp.int32)

    def _index(self, page_BH):
        """Where pages lie: indices along the first two axes of a cache's leaves."""
        row, head = jnp.indices(page_BH.shape, sparse=True)
        return row, self.slots.head(head)

    def _store(self, cache: Cache, page, offset, key_BHD, value_BHD, pos_BHNP, pos_B):
        """The new token's codes: into memory at once, or into the tail. Returns the waiting pages, the tail, the memory.

        When a page is full, the oldest in the tail is committed, and the others make room for the next.
        """
        N, last = cache.pos.shape[2], self.waits - 1
        used = page < N
        full, waiting = used & (offset == PAGE - 1), cache.waiting
        if self.unit > 1:
            waiting = waiting.at[..., last].set(jnp.where(used, page, waiting[..., last]))
        if not self.tailed:
            pos = jnp.broadcast_to(pos_B[:, None, None, None], (*page.shape, 1, 1))
            code = self._encode(key_BHD[:, :, None, None], value_BHD[:, :, None, None], pos)
            waiting = jnp.where(full[..., None], EMPTY, waiting)
            return waiting, (), self.slots.write(self.layout, cache.memory, page, offset, code)
        at = (*jnp.indices(page.shape, sparse=True), last, jnp.where(used, offset, PAGE))
        tail = tuple(x.at[at].set(y, mode="drop") for x, y in zip(cache.tail, (key_BHD, value_BHD)))

        def commit(waiting, tail, memory):
            page = waiting[..., 0]
            pos = self.slots.pages(pos_BHNP, page[..., None])
            key, value = (jnp.where((pos >= 0)[..., None], x[:, :, :1], 0.0) for x in tail)  # a page may have been cut midway
            code = self._encode(key, value, pos)
            memory = self.slots.write(self.layout, memory, jnp.where(full & (page >= 0), page, N), None, code)
            moved = jnp.concatenate([waiting[..., 1:], jnp.full_like(page, EMPTY)[..., None]], -1)
            shift = lambda x: jnp.where(full[..., None, None, None], jnp.roll(x, -1, 2), x) if last else x
            return jnp.where(full[..., None], moved, waiting), tuple(map(shift, tail)), memory

        return lax.cond(full.any(), commit, lambda *same: same, waiting, tail, cache.memory)

    # ----------------------------------------------------------------------------------------------------- attending

    def attend(self, cache: Cache, query_BHQD, pos_B, spec: AttentionSpec, shared=None, live_B=None) -> Attended:
        """Attention of one token's queries (Q = G query heads of a KV head) at positions `pos_B` over the cache.

        A row with nothing to read gives output 0, lse −inf and gradient 0. `shared` is what the layers before passed on.
        The cache that comes back is the one given, unless the retention observes what `live` rows attend to.
        """
        out, lse, info, shared = reading.token(self, cache, query_BHQD, pos_B, spec, shared)
        if self.retention.observes:
            cache = self._observed(cache, reading.weights(self, cache, query_BHQD, pos_B, spec, lse), pos_B, live_B)
        return Attended(out, lse, info, cache, shared)

    def _observed(self, cache: Cache, weight_BHNP, pos_B, live_B) -> Cache:
        flat = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])
        state = jax.tree.map(flat, cache.retained)
        new = self.retention.observe(state, flat(weight_BHNP), flat(cache.pos), pos_B[:, None, None])
        live = jnp.ones(pos_B.shape, bool) if live_B is None else live_B
        keep = lambda new, old: jnp.where(live.reshape(-1, *(1,) * (old.ndim - 1)), new.reshape(old.shape), old)
        return dataclasses.replace(cache, retained=jax.tree.map(keep, new, cache.retained))

    def extend(self, cache: Cache, query_BTHGD, key_BHTD, value_BHTD, pos_BT, spec: AttentionSpec, seen=None):
        """A chunk of a prompt: its attention over the cache and over itself `[B, T, H, G, D]`, then the cache that holds it too.

        What feeding the tokens one by one gives (positions EMPTY are pads, on the right), except that a chunk reads all
        that is stored, whatever the selection, and its own tokens before the codec rounds them or the retention drops them.
        A retention that observes is shown, token by token, the attention over what is stored by then.
        """
        out = reading.chunk(self, cache, query_BTHGD, key_BHTD, value_BHTD, pos_BT, spec)
        # written only after the old cache was read, or XLA keeps a copy of it: a zero that it cannot see to be one
        total = out.sum()
        zero = 0.0 * jnp.where(jnp.isfinite(total), total, 0.0)
        key, value = key_BHTD + zero, value_BHTD + zero

        def step(t, cache):
            pos = pos_BT[:, t]
            given = {name: x[:, :, t] for name, x in (seen or {}).items()}
            cache = self.append(cache, key[:, :, t], value[:, :, t], pos, pos >= 0, given)
            if not self.retention.observes:
                return cache
            return self.attend(cache, query_BTHGD[:, t], pos, spec, live_B=pos >= 0).cache

        return out, lax.fori_loop(0, pos_BT.shape[1], step, cache)

    # ------------------------------------------------------------------------------------------------- rows and lengths

    def rows(self, cache: Cache, index, places: int | None = None) -> Cache:
        """The caches of the named rows, in that order: forks a row when it is named twice. `places` as in `Layout.rows`."""
        rest = jax.tree.map(lambda x: x[index], dataclasses.replace(cache, memory=()))
        return dataclasses.replace(rest, memory=self.layout.rows(cache.memory, index, places))

    def truncate(self, cache: Cache, length_B) -> Cache:
        """Forgets the tokens at positions ≥ length. Only for lengths above `Cache.lost`: what was dropped does not return.

        A committed page that is cut midway keeps its codes; its lost slots are empty and the next token opens a new page.
        """
        pos = jnp.where(cache.pos >= length_B[:, None, None, None], EMPTY, cache.pos)
        held = (pos >= 0).sum(-1, dtype=jnp.int32)
        if self.unit == 1:
            return dataclasses.replace(cache, pos=pos, opened=held.sum(-1))
        left = self.slots.pages(held, cache.waiting)
        waiting = jnp.where(left > 0, cache.waiting, EMPTY)
        offset = jnp.where(waiting[..., -1] >= 0, left[..., -1], PAGE)
        opened = self.slots.by_head(cache, (held > 0).astype(jnp.int32))
        memory = self.layout.forget(cache.memory, self._held(pos, waiting))
        return dataclasses.replace(cache, pos=pos, opened=opened, waiting=waiting, offset=offset, memory=memory)

    def room(self, cache: Cache):
        """Tokens that each row can still take, `[B, H]`; a cache that evicts has always room."""
        units = self.slots.quota(cache, self.unit) - cache.opened
        if self.retention.evicts:
            units = jnp.full_like(units, jnp.iinfo(jnp.int32).max // PAGE - 1)
        if self.layout.shares:
            units = jnp.minimum(units, self.layout.free(cache.memory) // cache.opened.size)
        return units * self.unit + (PAGE - cache.offset if self.unit > 1 else 0)
