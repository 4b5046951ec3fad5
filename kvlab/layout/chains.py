"""Products of few queries with tiles where they lie (`kvlab.layout.bicl`), without a copy of any.

A matrix product with tiles that do not lie side by side is, to XLA on a CPU, a copy of them first. Written out as a sum of 64
products it is one loop that reads the tiles in place, vectorised along their rows; 16 KB of tiles go into a sum, so they
stay in the core's cache for all queries. Longer sums are not vectorised. The loop over rows and heads keeps each sum in a
computation of its own, or XLA would cut it up where something else uses the result.

Tiles of 64 are taken one by one. Of tiles of 32, the four that Z-order lays together are taken at once where the columns
come in pairs; where not, one by one too, in sums of 32. Axes of size 1 among the tiles make XLA copy them, and a reshape after
a slice through their rows makes it compute addresses number by number: hence two views, with all pages in one axis.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab.core import PAGE


def scores(tiles_BHNZ2tt, query_BHQD, order_RC: np.ndarray, start, pages: int):
    """Dot products of queries with the keys of consecutive pages, `[B, H, Q, N, P]`."""
    (B, H, N, Z, _, t, _), (Q, D), (R, C) = tiles_BHNZ2tt.shape, query_BHQD.shape[2:], order_RC.shape
    query = jnp.pad(query_BHQD, ((0, 0),) * 3 + ((0, C * t - D),)).reshape(B * H, Q, C, t)
    if _square(R, C):
        x, K = tiles_BHNZ2tt.reshape(-1, 2, 2, 2, t, t), C // 2
        of = jnp.moveaxis(query.reshape(B * H, Q, K, 2 * t), 1, -1)  # [X, K, 2t, Q]

        def term(i, mine, c):
            row = lax.dynamic_slice(x, ((i * N + start) * K, 0, c // t, 0, c % t, 0), (pages * K, 2, 1, 1, 1, t))
            return mine[:, None, c, :, None] * row.reshape(pages, K, 2, 1, t)

        total = _each(of, term, 2 * t).sum(2)  # of [X, n, K, R, Q, t]
    else:
        x = tiles_BHNZ2tt.reshape(-1, 2, t, t)
        of = jnp.moveaxis(query[:, :, np.argsort(order_RC, None) % C], 1, -1)  # [X, Z, t, Q]

        def term(i, mine, c):
            row = lax.dynamic_slice(x, ((i * N + start) * Z, 0, c, 0), (pages * Z, 1, 1, t))
            return mine[:, c, :, None] * row.reshape(pages, Z, 1, t)

        part = _each(of, term, t)  # [X, n, Z, Q, t]
        total = jnp.stack([sum(part[:, :, z] for z in row) for row in order_RC], 2)
    return jnp.moveaxis(total, 3, 1).reshape(B, H, Q, pages, PAGE)


def mix(tiles_BHNZ2tt, weight_BHQNP, order_RC: np.ndarray, start):
    """Sums of the values of consecutive pages with these weights, `[B, H, Q, C·t]`."""
    (B, H, N, Z, _, t, _), (Q, pages), (R, C) = tiles_BHNZ2tt.shape, weight_BHQNP.shape[2:4], order_RC.shape
    weight = jnp.moveaxis(weight_BHQNP.reshape(B * H, Q, pages, R, t), 1, 3)  # [X, n, R, Q, t]
    if _square(R, C):
        x, K = tiles_BHNZ2tt.reshape(-1, 2, 2, 2, t, t), C // 2

        def term(i, mine, p):
            row = lax.dynamic_slice(x, ((i * N + start) * K, p // t, 0, 1, p % t, 0), (pages * K, 1, 2, 1, 1, t))
            return mine[:, None, None, p // t, :, p % t, None] * row.reshape(pages, K, 2, 1, t)

        out = _each(weight, term, 2 * t).sum(1).reshape(B * H, C, Q, t)  # of [X, n, K, 2, Q, t]
    else:
        x = tiles_BHNZ2tt.reshape(-1, 2, t, t)
        of = weight[:, :, np.argsort(order_RC, None) // C] if R > 1 else weight  # [X, n, Z or 1, Q, t]

        def term(i, mine, p):
            row = lax.dynamic_slice(x, ((i * N + start) * Z, 1, p, 0), (pages * Z, 1, 1, t))
            return mine[:, :, :, p, None] * row.reshape(pages, Z, 1, t)

        part = _each(of, term, t).sum(1)  # of [X, n, Z, Q, t]
        out = jnp.stack([sum(part[:, z] for z in column) for column in order_RC.T], 1)
    return jnp.moveaxis(out, 1, 2).reshape(B, H, Q, C * t)


def _square(R: int, C: int) -> bool:
    """Whether Z-order is a row of squares of 2 × 2 tiles."""
    return R == 2 and C % 2 == 0


def _each(of_X, term, terms: int):
    """For each row and head i, the sum of `term(i, of[i], 0 … terms − 1)`, by halves so that its parts wait for nothing."""

    def one(i):
        mine = lax.dynamic_index_in_dim(of_X, i, keepdims=False)
        parts = [term(i, mine, j) for j in range(terms)]
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    return lax.map(one, jnp.arange(len(of_X)))
