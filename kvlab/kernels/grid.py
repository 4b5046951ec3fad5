"""Kernels whose grid walks pages: Mosaic on TPUs, which fetches the next blocks while one is read.

Which blocks these are follows from scalars that are there before the kernel: facts, the list of pages, the table. The grid is
row, KV head, split and step; the sums of a split stay in its output blocks from step to step. Steps past the last page name its
blocks again, so that nothing is fetched for them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvlab.attention import AttentionSpec
from kvlab.core import PAGE
from kvlab.kernels import page as step
from kvlab.kernels import places
from kvlab.kernels.page import COUNT, WAITING

LANES = 128  # blocks along slots are multiples of it
WIDEST = 512  # slots that are read at once where they lie side by side


class Now(NamedTuple):
    """Where a grid's step is: which of the walk, the page, and its place in a store."""

    i: Any
    page: Any
    place: Any


def run(
    place, numbers, backend, facts_BHF, query_BHQD, pos_BHNP, memory, index_BHR, table_BHN, spec: AttentionSpec,
    stack: step.Stack, splits: int, by_page: bool,
):  # fmt: skip
    """As `kvlab.kernels.loop.run`."""
    B, H, Q, D = query_BHQD.shape
    N = pos_BHNP.shape[2]
    if by_page and index_BHR is None and isinstance(place, places.Contiguous):
        index_BHR = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, H, N))  # a page a step
    blocks = (_Beside if isinstance(place, places.Contiguous) else _Apart)(place, numbers, N, index_BHR is not None)
    waits, pieces = facts_BHF.shape[-1] - WAITING, blocks.pieces
    walked = blocks.steps if index_BHR is None else index_BHR.shape[2]
    each = -(-walked // splits)
    scalars = [facts_BHF]
    if index_BHR is not None:
        scalars.append(index_BHR)
    if table_BHN is not None:
        at = table_BHN if index_BHR is None else jnp.take_along_axis(table_BHN, jnp.maximum(index_BHR, 0), 2)
        scalars.append(jnp.maximum(at, 0))

    def now(b, h, s, j, facts, *lists) -> Now:
        last = jnp.maximum(blocks.count(facts[b, h, COUNT]) - 1, 0)
        i = jnp.minimum(s * each + j, last)
        page = i if index_BHR is None else jnp.maximum(lists[0][b, h, i], 0)
        return Now(i, page, None if table_BHN is None else lists[-1][b, h, i])

    def spec_of(block, where):
        return pl.BlockSpec(block, lambda b, h, s, j, *lists: where(b, h, now(b, h, s, j, *lists)))

    def kernel(*refs):
        lists, (query, pos, memory, *outs) = refs[: len(scalars)], refs[len(scalars) :]
        b, h, s, j = (pl.program_id(i) for i in range(4))
        fact = lambda i: lists[0][b, h, i]
        sums, flat = outs[0], outs[1:4]

        @pl.when(j == 0)
        def _():
            start = step.nothing(Q, [D])
            for ref, x in zip((sums, *flat), (start.out[0], *start[1:])):
                ref[...] = x

        here = s * each + j < blocks.count(fact(COUNT))

        @pl.when(here)
        def _():
            rows = blocks.rows(now(b, h, s, j, *lists), pos, memory, fact, waits)
            part = lambda ref, piece: ref[:, piece.first : piece.first + piece.width]
            done = step.Carry(tuple(part(sums, piece) for piece in pieces), *(x[...] for x in flat))
            done, lse = step.attend(done, [part(query, piece) for piece in pieces], rows, spec, stack)
            for piece, x in zip(pieces, done.out):
                sums[:, piece.first : piece.first + piece.width] = x
            for ref, x in zip(flat, done[1:]):
                ref[...] = x
            if by_page:
                outs[4][...] = lse

    of_split = lambda *block: pl.BlockSpec((None, None, None, *block), lambda b, h, s, j, *_: (b, h, s, 0, 0))
    flat = jax.ShapeDtypeStruct((B, H, splits, Q, 1), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((B, H, splits, Q, D), jnp.float32), flat, flat, flat]
    specs = [of_split(Q, D), *(of_split(Q, 1) for _ in range(3))]
    if by_page:
        shapes.append(jax.ShapeDtypeStruct((B, H, each * splits, Q, 1), jnp.float32))
        specs.append(pl.BlockSpec((None, None, None, Q, 1), lambda b, h, s, j, *_: (b, h, s * each + j, 0, 0)))
    whole = pl.BlockSpec((None, None, Q, D), lambda b, h, s, j, *_: (b, h, 0, 0))
    pos, pos_spec = blocks.pos(pos_BHNP)
    found = jax.tree.map(lambda x: spec_of(*x), blocks.specs(memory), is_leaf=lambda x: isinstance(x, tuple))
    call = pl.pallas_call(
        kernel, shapes, name="decode_attention", **backend.options(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(B, H, splits, each), out_specs=specs,
            in_specs=[whole, spec_of(*pos_spec), found],
        ),
    )  # fmt: skip
    out = list(call(*scalars, query_BHQD, pos, memory))
    if by_page:
        out[4] = out[4][:, :, :walked]
    return out


class _Apart:
    """Blocks of layouts whose pages lie apart: a page a step."""

    def __init__(self, place, numbers, pages: int, listed: bool):
        self.place, self.numbers, self.steps, self.pieces = place, numbers, pages, place.pieces(in_powers=False)

    def count(self, pages):
        return pages

    def pos(self, pos_BHNP):
        return pos_BHNP[:, :, :, None], ((None, None, None, 1, PAGE), lambda b, h, now: (b, h, now.page, 0, 0))

    def specs(self, memory):
        def block(x):
            lead = len(self.place.lead(0, 0, 0, 0))
            inner = x.shape[lead:]
            return (None,) * lead + inner, lambda b, h, now: (*self.place.lead(b, h, now.page, now.place), *(0 for _ in inner))

        return jax.tree.map(block, memory)

    def rows(self, now: Now, pos, memory, fact, waits):
        place = self.place

        def read(side, row, piece):
            load = lambda leaf, name: leaf[place.inside(place.shape(leaf, side, name), side, name, row, piece)]
            return places.numbers(place, memory, side, load, self.numbers[side], _lying)

        rows = []
        for r in range(place.rows):
            ok = step.visible(pos[:, pl.ds(r * place.tile, place.tile)], now.page, fact, waits)
            rows.append(step.Row(ok, *([read(side, r, piece) for piece in self.pieces] for side in ("k", "v"))))
        return rows


def _lying(x):
    """`[n, 1]` as `[1, n]` by sums over diagonals, LANES at a time: Mosaic has no such transpose."""
    runs = [x[i : i + LANES] for i in range(0, len(x), LANES)]
    diagonal = lambda n: _along((n, n), 0) == _along((n, n), 1)
    return jnp.concatenate([jnp.where(diagonal(len(run)), run, 0.0).sum(0, keepdims=True) for run in runs], 1)


class _Beside:
    """Blocks of the contiguous layout: up to WIDEST slots a step, or the LANES around a page that a list names."""

    def __init__(self, place, numbers, pages: int, listed: bool):
        self.place, self.numbers, self.pages, self.listed = place, numbers, pages, listed
        self.pieces = place.pieces(in_powers=False)
        self.slots = pages * PAGE
        widths = (LANES,) if listed else (w for w in (WIDEST, WIDEST // 2) if self.slots % w == 0)
        self.width = min(next(iter(widths), LANES), self.slots)
        self.panel = min(LANES, pages)  # columns of parameters of whole pages
        self.steps = -(-self.slots // self.width)
        self.by_page: dict[tuple[str, str], bool] = {}  # leaves with parameters of whole pages

    def count(self, pages):
        return pages if self.listed else step.div(pages * PAGE + self.width - 1, self.width)

    def _block(self, now: Now):
        return step.div(now.page * PAGE, self.width) if self.listed else now.i

    def _panel(self, now: Now):
        return step.div(self._block(now) * self.width, PAGE * self.panel)

    def pos(self, pos_BHNP):
        flat = pos_BHNP.reshape(*pos_BHNP.shape[:2], 1, -1)
        return flat, ((None, None, 1, self.width), lambda b, h, now: (b, h, 0, self._block(now)))

    def specs(self, memory):
        def block(side, name):
            tokens, across = self.place.shape(memory[side][name], side, name)
            self.by_page[side, name] = tokens != PAGE
            along, at = (self.panel, self._panel) if tokens != PAGE else (self.width, self._block)
            if side == "k":
                return (None, None, across, along), lambda b, h, now: (b, h, 0, at(now))
            return (None, None, along, across), lambda b, h, now: (b, h, at(now), 0)

        return {side: {name: block(side, name) for name in memory[side]} for side in ("k", "v")}

    def rows(self, now: Now, pos, memory, fact, waits):
        first = self._block(now) * self.width
        slot = first + _along((1, self.width), 1)
        ok = step.visible(pos[...], step.div(slot, PAGE), fact, waits) & (slot < self.slots)
        if self.listed:
            ok = ok & (step.div(slot, PAGE) == now.page)

        def read(side):
            x, scale = self.numbers[side](memory[side]["x"][...]), memory[side].get("scale")
            if scale is None:
                return step.Numbers(known(x, side))
            scale = self._spread(scale[...], side, now, first) if self.by_page[side, "scale"] else scale[...]
            if min(scale.shape) > 1:  # of channels, and of several pages: neither tokens nor channels share it
                return step.Numbers(known(x.astype(jnp.float32) * scale, side))
            return step.Numbers(known(x, side), token=scale if side == "k" else _lying(known(scale, side)))

        def known(x, side):
            """The last block ends in something undefined, which not even a weight of 0 may meet."""
            if side == "k" or self.slots % self.width == 0:
                return x
            return jnp.where(first + _along((self.width, 1), 0) < self.slots, x.astype(jnp.float32), 0.0).astype(x.dtype)

        return [step.Row(ok, [read("k")], [read("v")])]

    def _spread(self, x, side, now: Now, first):
        """Parameters of whole pages `[C, M]`, or `[M, C]` of values, for each of a block's slots: an exact product."""
        base, axis = self._panel(now) * self.panel, 1 if side == "k" else 0
        x = jnp.where(base + _along(x.shape, axis) < self.pages, x, 0.0)
        shape = (self.panel, self.width) if side == "k" else (self.width, self.panel)
        mine = base + _along(shape, 1 - axis) == step.div(first + _along(shape, axis), PAGE)
        mine = jnp.where(mine, 1.0, 0.0)
        return step.dot(x, mine) if side == "k" else step.dot(mine, x)


def _along(shape, axis: int):
    return lax.broadcasted_iota(jnp.int32, shape, axis)
