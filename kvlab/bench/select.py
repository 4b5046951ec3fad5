"""What a selection saves: attention over everything against attention over what a gate picks, parts and sum.

One step of one layer over a raw fp32 cache of random numbers. Everything is interleaved, repetition by repetition, so that
ratios hold on a machine that does other things besides. The same numbers lie in two layouts: a selection is judged in the one
that suits it (`LAYOUT`), dense attention by the fastest of its ways in either.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import gates, memory
from kvlab.attention import AttentionSpec
from kvlab.bench.timed import compiled, interleaved
from kvlab.codec import Raw
from kvlab.core import PAGE, Record, part
from kvlab.layout import Contiguous, PageMajor
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import HySparse, ReadAll

HEADS, GROUPS, DIM, RANK = 8, 4, 128, 16
DENSE = ("in_place", "blocked", "in_place_page_major")
LAYOUTS = {"contiguous": Contiguous(), "page_major": PageMajor()}
LAYOUT = {"page": "page_major", "token": "contiguous"}  # of what is called `page` and `token`; the other has its name added


@part
class Blocked(Raw):
    """Fp32 numbers that are read in blocks all the same, as a codec's are."""

    in_place = False

    def encode(self, x_BHNPD, pos_BHNP=None):
        return {"x": x_BHNPD}

    def page_bytes(self, dim):
        return PAGE * dim * 4


def main(length: int, sparsity: float, dtype: str, pairs: int) -> dict:
    """Milliseconds of each piece, their temporaries in bytes, the bytes read, and how much faster than dense the sum is."""
    caches, query, now = filled(length, gated("page", sparsity, dtype))
    programs = _programs(caches, query, now, sparsity, dtype)
    times = interleaved(programs, pairs)
    figures = {"length": length, "sparsity": sparsity, "dtype": dtype, "pairs": pairs} | _figures(times)
    figures["temporaries"] = {name: temporaries for name, (_, temporaries) in programs.items()}
    figures["bytes_read"] = _bytes_read(caches, query, now, sparsity, dtype)
    _show(figures)
    return figures


def gated(granularity: str, sparsity: float, dtype: str) -> HySparse:
    """A selection by an untrained gate; its speed is a trained one's."""
    config = gates.GateConfig(layers=1, kv_heads=HEADS, head_dim=DIM, rank=RANK)
    layer = gates.make("spatial", config).layer(0)
    return HySparse(sparsity=sparsity, granularity=granularity, gate="untrained", dtype=dtype, layer=layer)


def policy(selection, layout: str, codec=None) -> Policy:
    return Policy(KeepAll(), codec or Raw(), LAYOUTS[layout], selection)


def filled(length: int, selection):
    """A full cache in every layout, the queries of the newest token, and its position."""
    draw = np.random.default_rng(0).standard_normal
    key, value = draw((2, 1, HEADS, length, DIM), np.float32)
    fill = jax.jit(lambda made, key, value: made.fill(Record(key, value, jnp.arange(length)[None]), length))
    caches = {name: jax.block_until_ready(fill(policy(selection, name), key, value)) for name in LAYOUTS}
    return caches, jnp.asarray(draw((1, HEADS, GROUPS, DIM), np.float32)), jnp.full(1, length - 1)


def attend(made, cache, query, now):
    done = made.attend(cache, query, now, AttentionSpec(DIM**-0.5))
    return done.out_BHQD, done.info.reads_BH


def _score(selection, cache, query, visible):
    return selection.scores(cache.index, query, visible, cache, None)


def _pick_pages(selection, cache, scores, visible):
    best = jnp.where(visible, scores, -jnp.inf).max(-1)
    return selection.pages(best, selection.count(visible)[0], visible, cache)


def _pick_tokens(selection, cache, scores, visible):
    return selection.tokens(scores, selection.count(visible)[0], visible, cache)


def _programs(caches, query, now, sparsity: float, dtype: str) -> dict[str, tuple[Callable, int]]:
    """Compiled pieces by name, with their temporaries in bytes."""
    page, token = (gated(kind, sparsity, dtype) for kind in ("page", "token"))
    cache = caches["contiguous"]
    visible = cache.pos >= 0
    scores = jax.jit(_score)(page, cache, query, visible)
    over = lambda selection, layout, codec=None: (attend, (policy(selection, layout, codec), caches[layout], query, now))
    pieces = {
        "in_place": over(ReadAll(), "contiguous"),
        "blocked": over(ReadAll(), "contiguous", Blocked()),
        "in_place_page_major": over(ReadAll(), "page_major"),
        "scoring": (_score, (page, cache, query, visible)),
        "topk": (_pick_pages, (page, cache, scores, visible)),
        "topk_token": (_pick_tokens, (token, cache, scores, visible)),
    }
    for kind, selection in (("page", page), ("token", token)):
        for layout in LAYOUTS:
            pieces[kind if layout == LAYOUT[kind] else f"{kind}_{layout}"] = over(selection, layout)
    return {name: compiled(f, args) for name, (f, args) in pieces.items()}


def _figures(times: dict[str, list[float]]) -> dict:
    """Medians; the speedups are medians of the pairs' ratios to the faster dense path."""
    dense = min(DENSE, key=lambda name: np.median(times[name]))
    figures: dict = {f"{name}_ms": float(np.median(x)) for name, x in times.items()}
    figures |= {"dense_ms": figures[f"{dense}_ms"], "dense_path": dense, "layout": LAYOUT}
    for name in LAYOUT:
        figures[f"speedup_{name}"] = float(np.median(np.array(times[dense]) / times[name]))
    return figures


def _bytes_read(caches, query, now, sparsity: float, dtype: str) -> dict[str, int]:
    """Bytes of keys, values and index keys that one step reads."""
    per_token = 2 * DIM * 4
    read = {"dense": int((caches["contiguous"].pos >= 0).sum()) * per_token}
    for kind, layout in LAYOUT.items():
        reads = jax.jit(attend)(policy(gated(kind, sparsity, dtype), layout), caches[layout], query, now)[1]
        read[kind] = int(reads.sum()) * per_token + memory.resident(caches[layout].index)
    return read


def _show(figures: dict) -> None:
    for name, value in figures.items():
        for key, x in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name + ' ' * bool(key) + key:24} {x:,.3f}" if isinstance(x, float) else f"{f'{name} {key}':24} {x}")
