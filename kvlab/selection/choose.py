"""From scores to what is read: how many, which, and their numbers. Decoding and training choose by these same functions.

Leading axes are free; the last one, X, runs over tokens or pages.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvlab.core import BY_MAXIMUM, BY_SHARE, NO_BOUND, PAGE
from kvlab.errors import ConfigError


def freeze(selection, name: str) -> None:
    """Makes an array of a list, one figure per row, in a frozen selection that is being made."""
    object.__setattr__(selection, name, jnp.asarray(getattr(selection, name), jnp.float32))


def of_rows(selection, name: str, index):
    """The selection for the named rows, where the field `name` holds a figure per row."""
    figures = getattr(selection, name)
    per_row = getattr(figures, "ndim", 0) == 1
    return dataclasses.replace(selection, **{name: figures[index]}) if per_row else selection


def by_row(figures, rows: int, who: str, what: str):
    """One figure, or one per row, as `[1 or rows, 1]`. Errors: ConfigError for another number."""
    figures = jnp.reshape(jnp.asarray(figures, jnp.float32), (-1, 1))
    if len(figures) not in (1, rows):
        raise ConfigError(f"{who}: {len(figures)} {what} for {rows} rows; give one, or one for each row")
    return figures


def count(length, sparsity, most: int | None):
    """K = min(most, ⌈(1 − sparsity)·length⌉), at least 1 where there is anything, and which bound was active.

    The ceiling forgives a hundredth of a token, so 1,000 tokens at sparsity 0.9 are 100 and not 101.
    """
    share = length - jnp.floor(length * sparsity + 0.01).astype(jnp.int32)
    number = jnp.maximum(share, jnp.minimum(length, 1))
    bound = jnp.where(number < length, BY_SHARE, NO_BOUND)
    if most is None:
        return number, bound
    return jnp.minimum(number, most), jnp.where(number > most, BY_MAXIMUM, bound)


def forced(pos_X, now, number, sinks, recent):
    """Tokens that are read whatever their score: the first `sinks` and the last `recent`, as far as `number` reaches."""
    first = jnp.clip(sinks, 0, jnp.maximum(number - 1, 0))
    last = jnp.minimum(jnp.maximum(recent, 1), number - first)
    return (pos_X < first[..., None]) | (pos_X > (now - last)[..., None])


def top(score_X, ok_X, pos_X, number):
    """Mask of the `number` highest scores among `ok`; among equals the newest. Fewer only where fewer are `ok`."""
    rank = jnp.where(ok_X, _sortable(score_X), 0)
    least = _threshold(rank, number)[..., None]
    keep = ok_X & (rank >= least)

    def untie():
        above, equal = ok_X & (rank > least), ok_X & (rank == least)
        place = jnp.where(equal, (pos_X + 1).astype(jnp.uint32), 0)
        newest = _threshold(place, number - above.sum(-1, dtype=jnp.int32))[..., None]
        return above | (equal & (place >= newest))

    return lax.cond((keep.sum(-1) > number).any(), untie, lambda: keep)


def cover(weight_X, mass):
    """How few of the weights (≥ 0) sum up to `mass`: all that are not 0, where they do not; a thousandth of one is forgiven."""
    bits = lax.bitcast_convert_type(weight_X, jnp.uint32)  # in the order of the weights, as none is negative
    total = lambda mask: jnp.where(mask, weight_X, 0.0).sum(-1)

    def step(i, low):
        higher = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(total(bits >= higher[..., None]) >= mass, higher, low)

    low = lax.fori_loop(0, 32, step, jnp.zeros(weight_X.shape[:-1], jnp.uint32))
    above, equal = bits > low[..., None], (bits == low[..., None]) & (weight_X > 0)
    least = lax.bitcast_convert_type(low, jnp.float32)
    more = jnp.ceil((mass - total(above)) / jnp.maximum(least, 1e-38) - 1e-3)
    number = above.sum(-1, dtype=jnp.int32) + jnp.clip(more, 0, equal.sum(-1)).astype(jnp.int32)
    return jnp.where(mass > 0, number, 0)


def _sortable(x):
    """Unsigned integers ≥ 1 in the order of float32 numbers; the two zeros are equal."""
    x = jnp.where(x == 0, 0.0, x)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    ordered = lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.uint32) ^ jnp.uint32(1 << 31)
    return jnp.maximum(ordered, 1)


def _threshold(value_X, number):
    """The number-th largest of unsigned integers, bit by bit from the highest: exact, and no sort."""

    def step(i, low):
        higher = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = (value_X >= higher[..., None]).sum(-1, dtype=jnp.int32) >= number
        return jnp.where(enough, higher, low)

    start = jnp.zeros(value_X.shape[:-1], jnp.uint32)
    return jnp.where(number > 0, lax.fori_loop(0, 32, step, start), jnp.uint32(0xFFFFFFFF))


def numbers(mask_BHX, size: int):
    """Where the mask is set, ascending, `[B, H, size]` padded with −1."""
    B, H, X = mask_BHX.shape
    place = jnp.where(mask_BHX, _running(mask_BHX) - 1, size)
    row, head = jnp.indices((B, H), sparse=True)
    ids = jnp.broadcast_to(jnp.arange(X, dtype=jnp.int32), mask_BHX.shape)
    return jnp.full((B, H, size), -1, jnp.int32).at[row[..., None], head[..., None], place].set(ids, mode="drop")


def _running(mask_BHX):
    """Running count; by products with a triangle of ones where pages allow it, which XLA's CPU backend does faster."""
    X = mask_BHX.shape[-1]
    if X % PAGE:
        return jnp.cumsum(mask_BHX, -1, dtype=jnp.int32)
    inner = mask_BHX.reshape(*mask_BHX.shape[:-1], -1, PAGE).astype(jnp.float32) @ jnp.triu(jnp.ones((PAGE, PAGE)))
    before = jnp.cumsum(inner[..., -1], -1) - inner[..., -1]
    return (inner + before[..., None]).astype(jnp.int32).reshape(mask_BHX.shape)
