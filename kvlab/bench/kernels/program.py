"""What is timed: many calls in one program, each over memory that no cache of the device still holds, each after the other."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab.bench.kernels.cases import Ready
from kvlab.bench.kernels.setting import Setting

NUDGE = 1e-6  # what of an output goes into the next queries, so that no call can be left out


def sizes(setting: Setting, stored: int, walk: int) -> tuple[int, int]:
    """How many equal memories of `stored` bytes a program goes through, and how often, where `walk` calls read one once."""
    sets = max(1, math.ceil(setting.cold / stored))
    return sets, walk * max(1, math.ceil(setting.traffic / (stored * sets)))


def program(made: Ready, repeats: int) -> Callable:
    """From memories, queries `[B, H, G, D]` and lists `[L, B, H, R]` or None to the last queries and their output.

    A barrier ties the memory to the repetition: without it a layout's or a peer's change of its memory would be made once and
    not be timed.
    """
    attend = jax.jit(made.attend)

    def run(sets, query_BHGD, lists):
        def step(i, carry):
            query, used, out = carry
            pages = None if lists is None else lax.dynamic_index_in_dim(lists, i % lists.shape[0], keepdims=False)
            for memory in sets:
                memory, _ = lax.optimization_barrier((memory, i))
                out = attend(memory, query, pages)
                used, query = query, query_BHGD + NUDGE * out
            return query, used, out

        return lax.fori_loop(0, repeats, step, (query_BHGD, query_BHGD, jnp.zeros_like(query_BHGD)))[1:]

    return run


def queries(setting: Setting, batch: int) -> jax.Array:
    x = np.random.default_rng(1).standard_normal((batch, setting.heads, setting.groups, setting.dim), np.float32)
    return jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)


def copy(words, repeats: int):
    """The memory's own speed: every word is read, counted up and written, `repeats` times."""
    return lax.fori_loop(0, repeats, lambda i, x: lax.optimization_barrier((x, i))[0] + 1, words)


def total(words, repeats: int):
    """The same for reading alone."""
    step = lambda i, found: found + lax.optimization_barrier((words, i))[0].sum(dtype=jnp.int32)
    return lax.fori_loop(0, repeats, step, jnp.int32(0))
