"""The product of the four parts: filling, appending, attending. `kvlab.core` says what the parts are."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import kernels, needs, ranking, reading, writing
from kvlab.attention import AttentionSpec
from kvlab.core import EMPTY, PAGE, Cache, Codec, Layout, Record, Retention, Selection, part, static
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
    """Retention × codec × layout × selection; raises `RefusedPolicy` with the reason and the ways out.

    `implementation` names what reads codes for single tokens' queries, and what else has a kernel (`kvlab.kernels`); it changes
    no more than rounding.
    """

    retention: Any
    codec: Any
    layout: Any
    selection: Any
    implementation: str = static(default="xla")

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
        if reason := kernels.why_not(self):
            yield reason
        if unknown := set(keep.needs) - set(needs.ALL):
            yield f"{keep} needs {sorted(unknown)}; allowed: {', '.join(needs.ALL)}"

    def at(self, layer: int, model) -> "Policy":
        """The policy for one layer of a model (`ModelConfig`), for parts that differ by layer; idempotent."""
        dim = model.head_dim
        codec, layout = self.codec.at(layer, model), self.layout.at(layer, model)
        per_token = (codec.keys.page_bytes(dim) + codec.values.page_bytes(dim)) / PAGE
        keep, select = self.retention.at(layer, model), self.selection.at(layer, model, per_token)
        parts = {"retention": keep, "codec": codec, "layout": layout, "selection": select}
        if all(each is getattr(self, name) for name, each in parts.items()):
            return self
        return dataclasses.replace(self, **parts)

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
        score, keep, quota = ranking.keep(self, record, budget)
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
        waiting, offset = writing.waiting(self, count, bounds[:, :-1, None] if self.slots.pooled else 0)
        tail = tuple(self.slots.pages(x, waiting) for x in (key, value)) if self.tailed else ()
        memory = self.layout.pack(writing.encode(self, key, value, pos), writing.held(self, pos, waiting))
        kept, carried = (), {}
        if self.retention.renews:
            seen = ranking.seen(self, record, budget)
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
        return ranking.keep(self, record, budget)[2].sum(-1)

    # ----------------------------------------------------------------------------------------------------- appending

    def append(self, cache: Cache, key_BHD, value_BHD, pos_B, live_B=None, seen=None) -> Cache:
        """Places one token per row at its true position, evicting if need be. Rows that are not `live` stay as they were.

        Never reads codes, so within one jit it must come before `attend`: XLA then updates the cache in place. `seen` holds
        what the retention needs, `[B, 1 or H, ...]`.
        """
        N = cache.pos.shape[2]
        live = jnp.ones(cache.opened.shape, bool) if live_B is None else jnp.broadcast_to(live_B[:, None], cache.opened.shape)
        page, offset, fresh, evicts = writing.place(self, cache, pos_B, live)
        page = jnp.where(live, page, N)  # out of range: dropped
        row, head = self._index(page)
        cleared = jnp.where(fresh & (self.unit > 1), page, N)
        alone = fresh if self.unit > 1 else (cache.pos[row, head, jnp.minimum(page, N - 1)] < 0).all(-1)
        pos = cache.pos.at[row, head, cleared].set(EMPTY, mode="drop")
        pos = pos.at[row, head, page, offset].set(jnp.broadcast_to(pos_B[:, None], page.shape), mode="drop")
        waiting, tail, memory = writing.store(self, cache, page, offset, key_BHD, value_BHD, pos, pos_B)
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

    def _index(self, page_BH):
        """Where pages lie: indices along the first two axes of a cache's leaves."""
        row, head = jnp.indices(page_BH.shape, sparse=True)
        return row, self.slots.head(head)

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
        memory = self.layout.forget(cache.memory, writing.held(self, pos, waiting))
        return dataclasses.replace(cache, pos=pos, opened=opened, waiting=waiting, offset=offset, memory=memory)

    def room(self, cache: Cache):
        """Tokens that each row can still take, `[B, H]`; a cache that evicts has always room."""
        units = self.slots.quota(cache, self.unit) - cache.opened
        if self.retention.evicts:
            units = jnp.full_like(units, jnp.iinfo(jnp.int32).max // PAGE - 1)
        if self.layout.shares:
            units = jnp.minimum(units, self.layout.free(cache.memory) // cache.opened.size)
        return units * self.unit + (PAGE - cache.offset if self.unit > 1 else 0)
