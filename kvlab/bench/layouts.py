"""What a layout costs: attention of one token over everything, in each layout, beside the contiguous one.

One step of one layer over random numbers, 32 query heads on 8 KV heads of 128. Repetitions are interleaved, so that ratios hold
on a machine that does other things besides. Token-major memory, which kvlab has no layout for, is read in several ways and
the fastest counts. Then parts that work together: a gate that picks pages, INT8 and tiles in one policy, against the fastest
dense fp32 of the same run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import memory
from kvlab.bench.select import DIM, GROUPS, HEADS, Blocked, attend, gated
from kvlab.bench.timed import compiled, interleaved
from kvlab.bench.token_major import TokenMajor
from kvlab.codec import Int8, Raw
from kvlab.core import PAGE, Codec, Layout, Record
from kvlab.errors import ConfigError
from kvlab.layout import Bicl, Contiguous, Paged, PageMajor
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll

LENGTHS = (4096, 32_768, 65_536)
CODECS: dict[str, Codec] = {"raw": Raw(), "int8_token": Int8(), "int8_channel": Int8("channel")}
LAYOUTS: dict[str, Layout] = {
    "contiguous": Contiguous(),
    "page_major": PageMajor(),
    "paged": Paged(),
    "bicl_64": Bicl(64, head_dim=DIM),
    "bicl_32": Bicl(32, head_dim=DIM),
}
TOKEN_MAJOR = {  # ways to read it: the layout, and whether numbers are read in blocks like codes
    "product": (TokenMajor(), False),
    "page_products": (TokenMajor(by_page=True), False),
    "blocks": (TokenMajor(), True),
    "heads": (TokenMajor(native=8), False),
    "heads_of_64_pages": (TokenMajor(native=64), False),
}
DENSE_FP32 = ("contiguous", "page_major", "bicl_64", "bicl_32")
FUSED = "bicl_64"


def main(lengths: list[int], pairs: int, fused_length: int, sparsity: float) -> dict:
    """Figures by codec, length and layout, and `fusion_speedup` at `fused_length`."""
    for length in (*lengths, fused_length):
        if length < PAGE or length % PAGE:
            raise ConfigError(f"length {length}; allowed: multiples of {PAGE}, such as {LENGTHS[0]}")
    figures: dict = {"lengths": list(lengths), "pairs": pairs}
    for name, codec in CODECS.items():
        figures[name] = {str(length): _show(f"{name} {length}", layouts(codec, length, pairs)) for length in lengths}
    figures |= fusion(fused_length, sparsity, pairs)
    print(f"fusion_speedup {figures['fusion_speedup']:.2f} at {fused_length} tokens and sparsity {sparsity}")
    return figures


def layouts(codec: Codec, length: int, pairs: int) -> dict:
    """By layout: `ms`, `over_contiguous`, `fraction_of_read_bandwidth` (against a sum over as many bytes), `temporaries`."""
    policies = {name: Policy(KeepAll(), codec, layout, ReadAll()) for name, layout in LAYOUTS.items()}
    for name, (layout, blocks) in TOKEN_MAJOR.items():
        if not (layout.native or blocks) or isinstance(codec, Raw):
            kept = Blocked() if blocks else codec
            policies[f"token_major {name}"] = Policy(KeepAll(), kept, layout, ReadAll())
    record, query, now = numbers(length)
    programs, bytes_ = {}, {}
    for name, policy in policies.items():
        cache = filled(policy, record, length)
        programs[name] = compiled(attend, (policy, cache, query, now))
        bytes_[name] = memory.resident(cache.memory)
    programs["sum"] = compiled(jnp.sum, (jnp.ones(bytes_["contiguous"] // 4),))
    times = interleaved(programs, pairs)
    ways = [name for name in policies if name.startswith("token_major")]
    best = min(ways, key=lambda name: np.median(times[name]))
    found = {name: _figures(times, name, bytes_, programs[name][1]) for name in LAYOUTS}
    found["token_major"] = {"way": best.removeprefix("token_major "), **_figures(times, best, bytes_, programs[best][1])}
    found["token_major"]["ways_ms"] = {name.removeprefix("token_major "): float(np.median(times[name])) for name in ways}
    return found


def fusion(length: int, sparsity: float, pairs: int) -> dict:
    """A gate's pages of INT8 codes in tiles, in one policy, against the fastest dense fp32: `fusion_speedup`."""
    record, query, now = numbers(length)
    fused = Policy(KeepAll(), Int8(), LAYOUTS[FUSED], gated("page", sparsity, "float16"))
    policies = {name: Policy(KeepAll(), Raw(), LAYOUTS[name], ReadAll()) for name in DENSE_FP32} | {"fused": fused}
    programs = {name: compiled(attend, (each, filled(each, record, length), query, now)) for name, each in policies.items()}
    times = interleaved(programs, pairs)
    dense = min(DENSE_FP32, key=lambda name: np.median(times[name]))
    medians = {name: float(np.median(x)) for name, x in times.items()}
    speedup = float(np.median(np.array(times[dense]) / times["fused"]))
    about = {"length": length, "sparsity": sparsity, "dense": dense, "ms": medians, "temporaries": programs["fused"][1]}
    return {"fusion_speedup": speedup, "fusion": about}


def numbers(length: int):
    """A record of random keys and values, the queries of the newest token, and its position."""
    draw = np.random.default_rng(0).standard_normal
    key, value = (jnp.asarray(draw((1, HEADS, length, DIM), np.float32)) for _ in range(2))
    query = jnp.asarray(draw((1, HEADS, GROUPS, DIM), np.float32))
    return Record(key, value, jnp.arange(length)[None]), query, jnp.full(1, length - 1)


def filled(policy: Policy, record: Record, length: int):
    return jax.block_until_ready(_fill(policy, record, length))


@functools.partial(jax.jit, static_argnums=2)
def _fill(policy: Policy, record: Record, length: int):
    return policy.fill(record, length)


def _figures(times, name: str, bytes_, temporaries: int) -> dict:
    mine, plain, read = (np.array(times[each]) for each in (name, "contiguous", "sum"))
    return {
        "ms": float(np.median(mine)),
        "over_contiguous": float(np.median(mine / plain)),
        "fraction_of_read_bandwidth": float(np.median(read / bytes_["contiguous"] * bytes_[name] / mine)),
        "temporaries": temporaries,
    }


def _show(title: str, found: dict) -> dict:
    print(f"{title:20} {'ms':>9} {'× contiguous':>13} {'of bandwidth':>13} {'temporaries':>13}")
    for name, x in found.items():
        print(
            f"  {name:18} {x['ms']:9.2f} {x['over_contiguous']:13.2f} {x['fraction_of_read_bandwidth']:13.2f} "
            f"{x['temporaries']:13,} {x.get('way', '')}"
        )
    return found
