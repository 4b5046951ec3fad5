"""The two products of decode attention as XLA compiles them here: what a row's width costs, and what a layout does."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab.errors import ConfigError, nearest

BLOCK = 512  # rows that are widened at a time; what is stored as float32 is read where it lies
TYPES = {"float32": 4, "float16": 2, "int8": 1}  # → bytes of a number


class Rows(NamedTuple):
    """`tokens` rows of `dim` numbers for each KV head, keys and values, each row `width` numbers from the one before."""

    tokens: int
    kv_heads: int
    queries: int
    dim: int
    width: int
    dtype: str

    @property
    def useful(self) -> int:
        """Bytes of keys and values without padding."""
        return 2 * self.kv_heads * self.tokens * self.dim * TYPES[self.dtype]


def program(rows: Rows) -> Callable[[], float]:
    """A function that runs both products once and returns seconds. `tokens` must be a multiple of BLOCK."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-99, 99, (2, rows.kv_heads, rows.tokens, rows.width)).astype(rows.dtype)
    numbers[..., rows.dim :] = 0
    query = np.zeros((rows.kv_heads, rows.queries, rows.width), np.float32)
    query[..., : rows.dim] = rng.normal(size=(*query.shape[:2], rows.dim)) / 1e4
    key, value = map(jnp.asarray, numbers)
    return _timed(_whole if rows.dtype == "float32" else _blocked, jnp.asarray(query), key, value)


def laid_out(rows: Rows, layout: str) -> Callable[[], float]:
    """As `program`, in float32 over keys and values in a layout of `FORMS`. Errors: ConfigError."""
    if layout not in FORMS:
        raise ConfigError(f"products over layout {layout!r}; {nearest(layout, FORMS)}")
    lay, both = FORMS[layout]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    key, value = (draw(rows.kv_heads, rows.tokens, rows.dim) for _ in range(2))
    return _timed(both, draw(rows.kv_heads, rows.queries, rows.dim), *lay(key, value))


def _timed(form, *arguments) -> Callable[[], float]:
    run = jax.jit(form).lower(*arguments).compile()

    def once() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        return time.perf_counter() - begin

    return once


def _whole(query_HGW, key_HSW, value_HSW):
    """Σ_s (q · k_s) v_s, without the softmax between, whose cost no width changes."""
    score = jnp.einsum("hgw,hsw->hgs", query_HGW, key_HSW)
    return jnp.einsum("hgs,hsw->hgw", score, value_HSW)


def _blocked(query_HGW, key_HSW, value_HSW):
    def step(i, out):
        cut = lambda x: lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, 1).astype(jnp.float32)
        return out + _whole(query_HGW, cut(key_HSW), cut(value_HSW))

    return lax.fori_loop(0, key_HSW.shape[1] // BLOCK, step, jnp.zeros_like(query_HGW))


def _tiles(tile: int):
    """Arrays [head, token tile, channel tile, ·, ·], keys' tiles channel by channel, and the products tile by tile."""

    def cut(x_HSD):
        H, S, D = x_HSD.shape
        return x_HSD.reshape(H, S // tile, tile, D // tile, tile).transpose(0, 1, 3, 2, 4)

    def both(query_HGD, key_HRCDT, value_HRCTD):
        H, G, D = query_HGD.shape
        query = query_HGD.reshape(H, 1, G, -1, tile).transpose(0, 1, 3, 2, 4)
        score = (jnp.broadcast_to(query, (*key_HRCDT.shape[:3], G, tile)) @ key_HRCDT).sum(2)
        out = (jnp.broadcast_to(score[:, :, None], query.shape[:1] + key_HRCDT.shape[1:3] + (G, tile)) @ value_HRCTD).sum(1)
        return out.transpose(0, 2, 1, 3).reshape(H, G, D)

    return lambda key, value: (jnp.swapaxes(cut(key), 3, 4), cut(value)), both


def _token_major(query_HGD, key_SHD, value_SHD):
    return jnp.einsum("hgs,shd->hgd", jnp.einsum("hgd,shd->hgs", query_HGD, key_SHD), value_SHD)


def _channel_major(query_HGD, key_HDS, value_HSD):
    return (query_HGD @ key_HDS) @ value_HSD


# layout → how keys and values `[H, S, D]` are laid, and both products over them
FORMS = {
    "token_major": (lambda key, value: (jnp.swapaxes(key, 0, 1), jnp.swapaxes(value, 0, 1)), _token_major),
    "head_major": (lambda key, value: (key, value), _whole),
    "channel_major": (lambda key, value: (jnp.swapaxes(key, 1, 2), value), _channel_major),
    "bicl_64": _tiles(64),
    "bicl_32": _tiles(32),
}
