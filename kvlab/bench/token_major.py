"""Token-major memory, the baseline of `kvlab.bench.layouts`: the heads of a token beside each other, in every way to read it."""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.core import PAGE, Layout, part, static


@part
class TokenMajor(Layout):
    """Keys and values lie as `[B, N, p, H, C]`, as a model computes them. For reading: it cannot be written to.

    Attributes:
      by_page: a product for each page, instead of one over all.
      native: pages at a time that are read head by head, 0 for all heads at once; where codes are numbers.
    """

    by_page: bool = static(default=False)
    native: int = static(default=0)

    def pack(self, code, held_BHN):
        return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), code)

    def slice(self, memory, start, pages: int):
        cut = lambda x: x if pages == x.shape[1] else lax.dynamic_slice_in_dim(x, start, pages, 1)
        return jax.tree.map(lambda x: jnp.moveaxis(cut(x), 3, 1), memory)

    def scores(self, memory, query_BHQD, start, pages: int):
        """Head by head."""
        key, (B, H, Q, _) = memory["k"]["x"], query_BHQD.shape
        one = lambda i: query_BHQD[i // H, i % H] @ _head(key, i, start, pages).T
        return lax.map(one, jnp.arange(B * H)).reshape(B, H, Q, pages, PAGE)

    def mix(self, memory, weight_BHQNP, start):
        value, (B, H, Q, pages, _) = memory["v"]["x"], weight_BHQNP.shape
        one = lambda i: weight_BHQNP[i // H, i % H].reshape(Q, -1) @ _head(value, i, start, pages)
        return lax.map(one, jnp.arange(B * H)).reshape(B, H, Q, -1)


def _head(x_BNpHC, i, start, pages: int):
    """Rows of one row and head, `[N·p, C]`."""
    _, _, p, H, C = x_BNpHC.shape
    return lax.dynamic_slice(x_BNpHC, (i // H, start, 0, i % H, 0), (1, pages, p, 1, C)).reshape(-1, C)
