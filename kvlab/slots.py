"""How the pages of a row are shared out among its heads.

    Even     every head has as many          leaves [B, H, N, P, ...]
    Pooled   each has what it was given      leaves [B, 1, M, P, ...]: head h has pages bounds[h] … bounds[h + 1] − 1

Whatever lies in slots goes the same way: positions, scores, codes. Pages are numbered along their axis, so a page number says
which head's it is; the last pages of a row whose heads were given fewer than another's belong to nobody.
"""

import jax
import jax.numpy as jnp

from kvlab.core import EMPTY, PAGE


class Even:
    """As many pages for every head."""

    pooled = False

    def sources(self, keep_BHT, pages: int, quota_BH):
        """Which token lies in each slot, counted through heads and tokens, −1 for none, `[B, H, N, P]`; and the bounds."""
        B, H, T = keep_BHT.shape
        index = _in_order(keep_BHT, pages * PAGE)
        flat = jnp.where(index < T, index + T * jnp.arange(H)[:, None], EMPTY)
        return flat.reshape(B, H, pages, PAGE), ()

    def head(self, head):
        """The index of a head along the leaves' second axis."""
        return head

    def first(self, cache):
        """Each head's first page, `[B, H]`."""
        return jnp.zeros_like(cache.opened)

    def quota(self, cache, unit: int):
        """Units that each head may hold."""
        return jnp.full_like(cache.opened, cache.budget // unit)

    def owned(self, cache):
        """Which pages are a head's, `[B, H, N]`."""
        return jnp.ones((*cache.opened.shape, cache.pos.shape[2]), bool)

    def apart(self, x_BHNP, cache, nothing):
        """What lies in the slots that are a head's own, `[B, H, N, P]`; `nothing` in others'."""
        return x_BHNP

    def pages(self, x, index_BHW):
        """Named pages of a leaf, by head, `[B, H, W, ...]`; a negative number names any."""
        index = jnp.maximum(index_BHW, 0)
        return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 3)), 2)

    def by_head(self, cache, x_BHN):
        """A figure of pages, summed for each head."""
        return x_BHN.sum(-1)

    def mine(self, x_BH1X, cache):
        """Of what every head says about all slots that it sees, `[B, H, X, ...]`, each slot's own head's."""
        return x_BH1X

    def write(self, layout, memory, page_BH, offset_BH, code):
        return layout.write(memory, page_BH, offset_BH, code)


class Pooled(Even):
    """As many pages as each head was given, side by side in one pool for each row."""

    pooled = True

    def sources(self, keep_BHT, pages: int, quota_BH):
        B, H, T = keep_BHT.shape
        bounds = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), jnp.cumsum(quota_BH, -1, dtype=jnp.int32)], -1)
        owner = owners(bounds, pages)
        local = (jnp.arange(pages) - jnp.take_along_axis(bounds, owner, 1))[..., None] * PAGE + jnp.arange(PAGE)
        index = _in_order(keep_BHT, T).reshape(B, H * T)
        there = (local < T) & (jnp.arange(pages) < bounds[:, -1:])[..., None]
        place = jnp.where(there, owner[..., None] * T + local, 0).reshape(B, -1)
        token = jnp.take_along_axis(index, place, 1).reshape(local.shape)
        return jnp.where(there & (token < T), owner[..., None] * T + token, EMPTY)[:, None], bounds

    def head(self, head):
        return jnp.zeros_like(head)

    def first(self, cache):
        return cache.bounds[:, :-1]

    def quota(self, cache, unit):
        return jnp.diff(cache.bounds)

    def owned(self, cache):
        pages = jnp.arange(cache.pos.shape[2])
        return (pages >= cache.bounds[:, :-1, None]) & (pages < cache.bounds[:, 1:, None])

    def apart(self, x_B1MP, cache, nothing):
        return jnp.where(self.owned(cache)[..., None], x_B1MP, nothing)

    def pages(self, x, index_BHW):
        B, H, W = index_BHW.shape
        index = jnp.maximum(index_BHW, 0).reshape(B, H * W, *(1,) * (x.ndim - 3))
        return jnp.take_along_axis(x[:, 0], index, 1).reshape(B, H, W, *x.shape[3:])

    def by_head(self, cache, x_B1M):
        return jnp.where(self.owned(cache), x_B1M, 0).sum(-1, dtype=x_B1M.dtype)

    def mine(self, x_BHX, cache):
        owner = jnp.repeat(owners(cache.bounds, cache.pos.shape[2]), PAGE, 1)[:, None]
        return jnp.take_along_axis(x_BHX, owner.reshape(*owner.shape, *(1,) * (x_BHX.ndim - 3)), 1)

    def write(self, layout, memory, page_BH, offset_BH, code):
        for head in range(page_BH.shape[1]):
            one = slice(head, head + 1)
            offset = None if offset_BH is None else offset_BH[:, one]
            memory = layout.write(memory, page_BH[:, one], offset, jax.tree.map(lambda x, one=one: x[:, one], code))
        return memory


def of(cache) -> Even:
    """How a cache's pages are shared out."""
    return Even() if isinstance(cache.bounds, tuple) else Pooled()


def owners(bounds, pages: int):
    """The head that each page is given to, `[B, M]`; pages that are nobody's name the last."""
    past = (jnp.arange(pages)[:, None] >= bounds[:, None, 1:]).sum(-1)
    return jnp.minimum(past, bounds.shape[1] - 2)


def _in_order(keep_BHT, slots: int):
    """Numbers of the tokens kept, in order, T for none, `[B, H, slots]`."""
    T = keep_BHT.shape[-1]
    index = jnp.sort(jnp.where(keep_BHT, jnp.arange(T), T), -1)[..., :slots]
    return jnp.pad(index, ((0, 0), (0, 0), (0, max(slots - T, 0))), constant_values=T)
