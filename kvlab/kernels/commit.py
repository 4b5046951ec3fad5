"""A full page of the raw tail becomes codes at its final place, in one pass: quantised in registers, written where it belongs.

What `codec.encode` and `Layout.write` do together, bit for bit, for layouts whose pages lie apart. A page of another layout, or
of a codec that `kvlab.kernels.encode` does not know, is written by XLA whatever the implementation: see `covers`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from kvlab import kernels
from kvlab.core import Codec, Layout
from kvlab.errors import ConfigError
from kvlab.kernels import backends, encode
from kvlab.layout import Contiguous, Paged


def covers(codec: Codec, layout: Layout) -> bool:
    """Whether there is a kernel that writes such pages."""
    apart = type(layout) in kernels.PLACES and not isinstance(layout, Contiguous)
    return apart and None not in (encode.of(codec.keys), encode.of(codec.values))


def commit(codec: Codec, layout: Layout, memory, page_BH, key_BHPD, value_BHPD, implementation: str):
    """The memory with a page's codes for each row and head, written in place; rows whose page is N or more write nothing.

    Args:
      memory: the layout's; donate it, or it is copied first.
      page_BH: int32 numbers of pages.
      key_BHPD, value_BHPD: float32, exact, all 64 tokens; zeros where there is none.

    Errors: ConfigError for parts without a kernel.
    """
    backends.known(implementation)
    if implementation == "xla":
        code = {side: c.encode(x[:, :, None]) for side, c, x in _sides(codec, key_BHPD, value_BHPD)}
        return layout.write(memory, page_BH, None, code)
    if not covers(codec, layout):
        raise ConfigError(
            f'no kernel writes pages of {codec} into {layout}; write implementation="xla", or raw, int8 or fp8 codes in a layout '
            "whose pages lie apart: page_major, paged or bicl"
        )
    key_BHPD = backends.only_on(key_BHPD, backends.BACKENDS[implementation].platform, implementation)
    form = {"triton": _direct, "tpu": _staged, "interpret": functools.partial(_direct, interpret=True)}[implementation]
    return run(form, codec, layout, memory, page_BH, key_BHPD, value_BHPD)


def run(form, codec: Codec, layout: Layout, memory, page_BH, key_BHPD, value_BHPD):
    """The same by `_direct` or `_staged`."""
    where, table, pages = page_BH, {}, _pages(memory)
    if isinstance(layout, Paged):
        claimed, where = layout.claim(memory, page_BH)
        table = {"table": claimed}
    leaves = {name: x for name, x in memory.items() if name != "table"}
    place = kernels.PLACES[type(layout)](layout, memory, pages, key_BHPD.shape[-1])
    encoders = {side: encode.of(c) for side, c, _ in _sides(codec, None, None)}
    return {**form(place, encoders, leaves, where.astype(jnp.int32), key_BHPD, value_BHPD), **table}


def _pages(memory) -> int:
    """N."""
    return memory["table"].shape[2] if "table" in memory else jax.tree.leaves(memory)[0].shape[2]


def _sides(codec: Codec, key, value):
    return ("k", codec.keys, key), ("v", codec.values, value)


def _direct(place, encoders, memory, where_BH, key, value, interpret: bool = False):
    """A program for a row and head, which stores to the memory itself: Triton, and anything in interpret mode."""

    def kernel(where_ref, key_ref, value_ref, before, out):
        b, h = pl.program_id(0), pl.program_id(1)
        at = where_ref[b, h]

        @pl.when(at < _places(place, memory))
        def _():
            _write(place, encoders, {"k": key_ref, "v": value_ref}, out, place.lead(b, h, at, at), in_powers=True)

    page = pl.BlockSpec((None, None, *key.shape[2:]), lambda b, h: (b, h, 0, 0))
    whole = lambda tree: jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda b, h, n=x.ndim: (0,) * n), tree)
    return pl.pallas_call(
        kernel,
        grid=where_BH.shape,
        in_specs=[whole(where_BH), page, page, whole(memory)],
        out_specs=whole(memory),
        out_shape=_shapes(memory),
        input_output_aliases={3 + i: i for i in range(len(jax.tree.leaves(memory)))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="commit_page",
    )(where_BH, key, value, memory)


def _staged(place, encoders, memory, where_BH, key, value, interpret: bool = False):
    """The page is laid out beside the core, then copied to the memory, a run for each leaf: Mosaic on TPUs."""
    lead = len(place.lead(0, 0, 0, 0))
    leaves, tree = jax.tree.flatten(memory)

    def kernel(where_ref, key_ref, value_ref, *refs):
        b, h = pl.program_id(0), pl.program_id(1)
        at = where_ref[b, h]
        out, scratch = refs[len(leaves) : 2 * len(leaves)], refs[2 * len(leaves) :]

        @pl.when(at < _places(place, memory))
        def _():
            for ref, leaf in zip(scratch, leaves):
                if leaf.ndim - lead > 2:  # tiles, whose last columns may hold nothing
                    ref[...] = jnp.zeros(ref.shape, ref.dtype)
            _write(place, encoders, {"k": key_ref, "v": value_ref}, jax.tree.unflatten(tree, scratch), (), in_powers=False)
            pltpu.sync_copy(list(scratch), [ref.at[place.lead(b, h, at, at)] for ref in out])

    page = pl.BlockSpec((None, None, *key.shape[2:]), lambda b, h, where: (b, h, 0, 0))
    far = [pl.BlockSpec(memory_space=pl.ANY)] * len(leaves)
    done = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=where_BH.shape,
            in_specs=[page, page, *far],
            out_specs=far,
            scratch_shapes=[pltpu.VMEM(x.shape[lead:], x.dtype) for x in leaves],
        ),
        out_shape=_shapes(leaves),
        input_output_aliases={3 + i: i for i in range(len(leaves))},
        interpret=interpret,
        name="commit_page",
    )(where_BH, key, value, *leaves)
    return jax.tree.unflatten(tree, done)


def _shapes(memory):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), memory)


def _places(place, memory) -> int:
    """How many places a page number may name."""
    return place.leaf(memory, "v", "x").shape[len(place.lead(0, 0, 0, 0)) - 1]


def _write(place, encoders, pages, memory, lead, in_powers: bool) -> None:
    """Codes of keys and values, block by block as the layout has them, into leaves at `lead`."""
    pieces, rows = place.pieces(in_powers), range(place.rows)
    for side, encoder in encoders.items():
        load = lambda r, piece, ref=pages[side]: ref[pl.ds(r * place.tile, place.tile), pl.ds(piece.first, piece.width)]
        blocks = {(r, i): load(r, piece) for r in rows for i, piece in enumerate(pieces)}
        scales = _scales(encoder, blocks)

        def store(name, r, piece, x, turned, side=side):
            leaf = place.leaf(memory, side, name)
            inside = place.inside(place.shape(leaf, side, name), side, name, r, piece)
            leaf[(*lead, *inside)] = x.T if turned else x

        for (r, i), x in blocks.items():
            store("x", r, pieces[i], encoder.codes(x, scales.get((r, i))), side == "k")
        for (r, i), scale in scales.items():
            if not ((1 in encoder.over and i) or (0 in encoder.over and r)):  # one that several blocks share is stored once
                store("scale", r, pieces[i], scale, side == "k" and not place.canonical)


def _scales(encoder, blocks) -> dict[tuple[int, int], Any]:
    """The scale of each block of a page, by its row and column of blocks; blocks that share one have the same."""
    if not encoder.over:
        return {}
    most = {}
    for at, x in blocks.items():
        x = jnp.abs(x)
        for axis in encoder.over:
            x = x.max(axis=axis, keepdims=True)
        most[at] = x
    shared = lambda a, b: all(axis in encoder.over or i == j for axis, (i, j) in enumerate(zip(a, b)))
    joined = lambda at: functools.reduce(jnp.maximum, [x for other, x in most.items() if shared(at, other)])
    return {at: encoder.scale(joined(at)) for at in blocks}
