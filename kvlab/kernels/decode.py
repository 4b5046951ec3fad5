"""Decode attention by a kernel: what it is told, its padding, and the exact merge of its splits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kvlab.attention import MASKED, AttentionSpec, Partial
from kvlab.core import EMPTY, PAGE, Cache
from kvlab.errors import RefusedPolicy
from kvlab.kernels import backends, codes, grid, loop
from kvlab.kernels.backends import Backend
from kvlab.kernels.page import COUNT, Stack

FORMS = {"loop": loop.run, "grid": grid.run}
PROGRAMS = 256  # what a large GPU keeps busy with


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Decode attention over one layout's memory of one codec for keys and one for values.

    Attributes:
      place: from a layout, a memory, the number of pages and the head dimension to where codes lie (`kvlab.kernels.places`).
      keys, values: from codes to numbers (`kvlab.kernels.codes`).
    """

    place: Callable
    keys: Callable
    values: Callable

    def __call__(
        self, backend: Backend, layout, memory, query_BHGD, pos_BHNP, facts_BHF, spec: AttentionSpec, index_BHR=None,
        splits: int | None = None, by_page: bool = False,
    ) -> tuple[Partial, Any]:  # fmt: skip
        """Queries, which are scaled, over the pages `index` or the first COUNT: the partial, and what pages got.

        `facts` are those of `facts`; a list `index` is padded with −1 at the end. `splits` parts of the sequence are read
        side by side. `by_page`: log-sum-exps `[B, H, G, R]` of the pages named, or of all, −inf where nothing was read.
        Errors: RefusedPolicy for a head dimension that the back end cannot hold.
        """
        B, H, G, D = query_BHGD.shape
        if D % backend.piece:
            raise RefusedPolicy(
                f"a head dimension of {D} on {backend.platform}; allowed: multiples of {backend.piece}; "
                'write implementation = "xla"'
            )
        place, table = self.place(layout, memory, pos_BHNP.shape[2], D), memory.get("table")
        walked = (pos_BHNP if index_BHR is None else index_BHR).shape[2]
        if splits is None:
            splits = 1 if backend.form == "grid" else max(1, min(-(-PROGRAMS // (B * H)), -(-walked // 4)))
        numbers, stored = {"k": self.keys, "v": self.values}, {name: x for name, x in memory.items() if name != "table"}
        parts = codes.parts([(numbers[side], place.leaf(stored, side, "x")) for side in numbers])
        query = backends.only_on(query_BHGD.astype(jnp.float32), backend.platform, backend.name)
        out, *flat = FORMS[backend.form](
            place, numbers, backend, facts_BHF, _stacked(query, parts, backend.queries), pos_BHNP, stored, index_BHR, table, spec,
            Stack(G, parts), splits, by_page,
        )  # fmt: skip
        out = out[..., : parts * G, :].reshape(*out.shape[:3], parts, G, D).sum(3)
        done = _merged(Partial(out, *(x[..., :G, 0] for x in flat[:3])))
        if not by_page:
            return done, None
        read = jnp.arange(walked)[:, None] < facts_BHF[..., COUNT, None, None]
        lse = jnp.where(read & (flat[3][..., :G, 0] > MASKED / 4), flat[3][..., :G, 0], -jnp.inf)
        return done, jnp.swapaxes(lse, 2, 3)


def _stacked(query_BHGD, parts: int, least: int):
    """Each head's query once for each part, `[B, H, Q, D]`: as many rows as that takes, or the power of two from `least` on."""
    rows = parts * query_BHGD.shape[2]
    more = max(least, 1 << (rows - 1).bit_length()) - rows if least > 1 else 0
    return jnp.pad(jnp.tile(query_BHGD, (1, 1, parts, 1)), ((0, 0), (0, 0), (0, more), (0, 0)))


def _merged(p: Partial) -> Partial:
    """Partials `[B, H, S, G, ...]` of disjoint tokens as one, exactly."""
    top = p.top.max(2)
    weight = jnp.exp(p.top - top[:, :, None])
    total = lambda x: (weight * x).sum(2)
    return Partial((weight[..., None] * p.out).sum(2), top, total(p.mass), total(p.moment))


def shares(done: Partial, page_BHGR):
    """What each page got of the attention to all that a kernel read, from its log-sum-exps: `[B, H, G, R]`, adds up to 1."""
    empty = (done.mass <= 0)[..., None]
    total = done.top + jnp.log(jnp.where(done.mass > 0, done.mass, 1.0))
    return jnp.where(empty, 0.0, jnp.exp(page_BHGR - total[..., None]))


def facts(cache: Cache, pos_B, unit: int, rule, spec: AttentionSpec, waits: bool, index_BHR=None):
    """What a kernel must know besides memory, int32 `[B, H, WAITING + W]`; columns as in `kvlab.kernels.page`.

    The query's position; the retention's sinks and the position after which it sees (`rule`, a `Visibility`), the same of the
    model's window; how many pages to walk, of the list `index` or of the cache, whose units are `unit` tokens; and the
    pages that wait in the tail, if any do.
    """
    now = jnp.broadcast_to(pos_B[:, None], cache.opened.shape)
    after = lambda window: jnp.full_like(now, EMPTY) if window is None else now - window
    if index_BHR is None:
        count = jnp.minimum(-(-cache.opened * unit // PAGE), cache.pos.shape[2])
    else:
        count = (index_BHR >= 0).sum(-1)
    columns = [now, jnp.broadcast_to(rule.sinks, now.shape), after(rule.window), after(spec.window), count]
    told = jnp.stack([x.astype(jnp.int32) for x in columns], -1)
    return jnp.concatenate([told, cache.waiting], -1) if waits else told
