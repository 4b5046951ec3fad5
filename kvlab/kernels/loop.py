"""Kernels whose programs walk pages: Triton on NVIDIA GPUs, and anything in interpret mode.

A program per row, KV head and split. It reads its list of pages and the table itself, and a page at a time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvlab.attention import AttentionSpec
from kvlab.kernels import page as step
from kvlab.kernels import places
from kvlab.kernels.page import COUNT, WAITING


def run(
    place, numbers, backend, facts_BHF, query_BHQD, pos_BHNP, memory, index_BHR, table_BHN, spec: AttentionSpec,
    stack: step.Stack, splits: int, by_page: bool,
):  # fmt: skip
    """Partials of the splits: out `[B, H, S, Q, D]`, top, mass and moment `[B, H, S, Q, 1]`; with `by_page` log-sum-exps
    `[B, H, R, Q, 1]` of the pages that were walked, what is written beyond COUNT is undefined. Rows of Q are as `stack` says."""
    B, H, Q, D = query_BHQD.shape
    pieces = place.pieces(in_powers=True)
    waits = facts_BHF.shape[-1] - WAITING

    def kernel(facts, query, pos, memory, index, table, *outs):
        b, h, s = (pl.program_id(i) for i in range(3))
        told = [facts[b, h, i] for i in range(WAITING + waits)]
        fact = lambda i: told[i]
        asked = [query[b, h, :, pl.ds(piece.first, piece.width)] for piece in pieces]

        def read(side, page, at, row, piece):
            def load(leaf, name):
                inside = place.inside(place.shape(leaf, side, name), side, name, row, piece, page)
                return leaf[(*place.lead(b, h, page, at), *inside)]

            return places.numbers(place, memory, side, load, numbers[side], lambda x: x.reshape(x.shape[::-1]))

        def one(i, done):
            page = i if index is None else index[b, h, i]
            at = None if table is None else jnp.maximum(table[b, h, page], 0)
            rows = []
            for r in range(place.rows):
                where = pos[b, h, page, pl.ds(r * place.tile, place.tile)][None, :]
                keys = [read("k", page, at, r, piece) for piece in pieces]
                values = [read("v", page, at, r, piece) for piece in pieces]
                rows.append(step.Row(step.visible(where, page, fact, waits), keys, values))
            done, lse = step.attend(done, asked, rows, spec, stack)
            if by_page:
                outs[4][b, h, i, :, :] = lse
            return done

        count = fact(COUNT)
        each = step.div(count + splits - 1, splits)
        first = s * each
        done = lax.fori_loop(first, jnp.minimum(first + each, count), one, step.nothing(Q, [piece.width for piece in pieces]))
        for piece, out in zip(pieces, done.out):
            outs[0][b, h, s, :, pl.ds(piece.first, piece.width)] = out
        for ref, x in zip(outs[1:4], done[1:]):
            ref[b, h, s, :, :] = x

    walked = pos_BHNP.shape[2] if index_BHR is None else index_BHR.shape[2]
    flat = jax.ShapeDtypeStruct((B, H, splits, Q, 1), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((B, H, splits, Q, D), jnp.float32), flat, flat, flat]
    if by_page:
        shapes.append(jax.ShapeDtypeStruct((B, H, walked, Q, 1), jnp.float32))
    call = pl.pallas_call(kernel, shapes, grid=(B, H, splits), name="decode_attention", **backend.options())
    return call(facts_BHF, query_BHQD, pos_BHNP, memory, index_BHR, table_BHN)
