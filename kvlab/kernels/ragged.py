"""Queries over runs of packed keys, by an online softmax over blocks: the kernel, in two forms.

A block of queries meets the blocks of keys from its lowest `low` to its highest `high` and no others
(https://arxiv.org/abs/2205.14135, algorithm 1). Queries lie head by head, `[Hq, X, D]`, keys and values as `[Hkv, Y, D]`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from kvlab.attention import MASKED, AttentionSpec

LEAST = 16  # rows of a product on a GPU


class Shape(NamedTuple):
    """What sets a kernel's shape besides its arrays."""

    spec: AttentionSpec
    query_block: int
    key_block: int


def run(form, query_HXD, key_HYD, value_HYD, low_X, high_X, shape: Shape):
    """Output `[Hq, X, D]` in the queries' type and log-sum-exp `[Hq, X]` by `form`, `programs` or `grid`."""
    X, qb, kb = query_HXD.shape[1], shape.query_block, shape.key_block
    query = _padded(query_HXD, 1, qb)
    key, value = _padded(key_HYD, 1, kb), _padded(value_HYD, 1, kb)
    low, high = _padded(low_X, 0, qb), _padded(high_X, 0, qb)
    some = (high > low).reshape(-1, qb)
    first = jnp.where(some, low.reshape(-1, qb), key.shape[1]).min(1) // kb
    count = jnp.maximum(-(-jnp.where(some, high.reshape(-1, qb), 0).max(1) // kb) - first, 0)
    blocks = jnp.stack([jnp.where(count > 0, first, 0), count]).astype(jnp.int32)
    out, lse = form(blocks, low[:, None], high[:, None], query, key, value, shape)
    return out[:, :X, : query_HXD.shape[2]], lse[:, :X, 0]


def programs(blocks, low, high, query, key, value, shape: Shape, interpret: bool = False):
    """A program for a head and a block of queries, which walks its blocks of keys."""
    (heads, X, dim), (kv_heads, Y, _), (spec, qb, kb) = query.shape, key.shape, shape
    wide = dim if interpret else max(pl.next_power_of_2(dim), LEAST)
    query, key, value = (_padded(x, 2, wide) for x in (query, key, value))
    group = heads // kv_heads

    def kernel(blocks_ref, low_ref, high_ref, query_ref, key_ref, value_ref, out_ref, lse_ref):
        here, mask = pl.program_id(1), (low_ref[...], high_ref[...])
        query = query_ref[...]

        def step(i, done):
            at = (blocks_ref[0, here] + i) * kb
            keys, values = key_ref[pl.ds(at, kb), :], value_ref[pl.ds(at, kb), :]
            return _meet(query, keys, values, mask, at, done, spec)

        start = _nothing(qb, wide)
        out_ref[...], lse_ref[...] = _finish(lax.fori_loop(0, blocks_ref[1, here], step, start), out_ref.dtype)

    queries = pl.BlockSpec((None, qb, wide), lambda h, i: (h, i, 0))
    column = pl.BlockSpec((qb, 1), lambda h, i: (i, 0))
    keys = pl.BlockSpec((None, Y, wide), lambda h, i: (lax.div(h, group), 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(heads, X // qb),
        in_specs=[pl.BlockSpec(blocks.shape, lambda h, i: (0, 0)), column, column, queries, keys, keys],
        out_specs=[queries, pl.BlockSpec((None, qb, 1), lambda h, i: (h, i, 0))],
        out_shape=_outputs(query),
        compiler_params=plgpu.CompilerParams(num_warps=4 if wide <= 64 else 8, num_stages=2),
        interpret=interpret,
        name="varlen_attention",
    )(blocks, low, high, query, key, value)


def grid(blocks, low, high, query, key, value, shape: Shape, interpret: bool = False):
    """A step of the grid for a head, a block of queries and one of its blocks of keys, which the next step's copy overlaps."""
    (heads, X, dim), (kv_heads, _, _), (spec, qb, kb) = query.shape, key.shape, shape
    group = heads // kv_heads

    def kernel(blocks_ref, low_ref, high_ref, query_ref, key_ref, value_ref, out_ref, lse_ref, top_ref, mass_ref, sum_ref):
        here, i = pl.program_id(1), pl.program_id(2)
        done = top_ref, mass_ref, sum_ref

        @pl.when(i == 0)
        def _():
            for ref, x in zip(done, _nothing(qb, dim)):
                ref[...] = x

        @pl.when(i < blocks_ref[1, here])
        def _():
            at, mask = (blocks_ref[0, here] + i) * kb, (low_ref[...], high_ref[...])
            before = tuple(ref[...] for ref in done)
            for ref, x in zip(done, _meet(query_ref[...], key_ref[...], value_ref[...], mask, at, before, spec)):
                ref[...] = x

        @pl.when(i == pl.num_programs(2) - 1)
        def _():
            out_ref[...], lse_ref[...] = _finish(tuple(ref[...] for ref in done), out_ref.dtype)

    queries = pl.BlockSpec((None, qb, dim), lambda h, n, i, blocks: (h, n, 0))
    column = pl.BlockSpec((qb, 1), lambda h, n, i, blocks: (n, 0))
    at = lambda n, i, blocks: blocks[0, n] + jnp.minimum(i, jnp.maximum(blocks[1, n] - 1, 0))  # no copy after the last one
    keys = pl.BlockSpec((None, kb, dim), lambda h, n, i, blocks: (lax.div(h, group), at(n, i, blocks), 0))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, X // qb, jnp.maximum(blocks[1].max(), 1)),
            in_specs=[column, column, queries, keys, keys],
            out_specs=[queries, pl.BlockSpec((None, qb, 1), lambda h, n, i, blocks: (h, n, 0))],
            scratch_shapes=[pltpu.VMEM(x.shape, jnp.float32) for x in jax.eval_shape(lambda: _nothing(qb, dim))],
        ),
        out_shape=_outputs(query),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="varlen_attention",
    )(blocks, low, high, query, key, value)


def _outputs(query):
    return [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((*query.shape[:2], 1), jnp.float32)]


def _nothing(queries: int, dim: int):
    """Largest logit, sum of exponentials, weighted values: over no keys at all."""
    return jnp.full((queries, 1), MASKED / 2), jnp.zeros((queries, 1)), jnp.zeros((queries, dim))


def _meet(query_QD, key_KD, value_KD, mask, first, done, spec: AttentionSpec):
    """Some queries and a block of keys, the first of which is number `first`."""
    (low, high), (top, mass, out) = mask, done
    logits = spec.cap(_dot(query_QD, key_KD.T) * spec.scale)
    number = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where((number >= low) & (number < high), logits, MASKED)
    new = jnp.maximum(top, logits.max(1, keepdims=True))
    weight, shrink = jnp.exp(logits - new), jnp.exp(top - new)
    out = out * shrink + _dot(weight.astype(value_KD.dtype), value_KD)
    return new, mass * shrink + weight.sum(1, keepdims=True), out


def _finish(done, dtype):
    top, mass, out = done
    some = jnp.where(mass > 0, mass, 1.0)
    return (out / some).astype(dtype), jnp.where(mass > 0, top + jnp.log(some), -jnp.inf)


def _dot(a, b):
    """A product in float32; of float32 numbers without rounding them first."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _padded(x, axis: int, multiple: int):
    more = -x.shape[axis] % multiple
    return x if not more else jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])
