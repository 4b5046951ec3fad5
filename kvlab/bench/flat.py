"""Does a decode step cost what is live, or what there is room for? 128 live tokens at capacities of 1k and 32k."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import parts
from kvlab.bench.steps import steps
from kvlab.core import EMPTY, Record

POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "INT8 per token": {"codec": "int8"},
    "INT8 per channel": {"codec": {"name": "int8", "scale": "channel"}},
    "bfloat16": {"codec": {"name": "raw", "dtype": "bfloat16"}},
}
LAYERS, HEADS, GROUPS, DIM, LIVE, STEPS, PAIRS = 4, 3, 3, 64, 128, 32, 9
SHORT, LONG = 1024, 32_768


def main() -> dict:
    """Microseconds per layer and step at both capacities, and the median ratio of pairs, for each policy."""
    figures: dict[str, Any] = {}
    for name, table in POLICIES.items():
        runs = {capacity: _prepare(parts.policy(table), capacity) for capacity in (SHORT, LONG)}
        times: dict[int, list[float]] = {capacity: [] for capacity in runs}
        for _ in range(PAIRS):
            for capacity, run in runs.items():
                times[capacity].append(run() / STEPS / LAYERS * 1e6)
        ratio = float(np.median(np.array(times[LONG]) / np.array(times[SHORT])))
        figures[name] = {"us_1k": float(np.median(times[SHORT])), "us_32k": float(np.median(times[LONG])), "ratio": ratio}
        print(f"{name:18} {figures[name]['us_1k']:8.1f} us at 1k {figures[name]['us_32k']:8.1f} us at 32k   ratio {ratio:.2f}")
    figures["largest_ratio"] = max(f["ratio"] for f in figures.values())
    return figures


def _prepare(policy, capacity: int):
    """A function that decodes STEPS tokens from LIVE ones and returns seconds."""
    key = jax.random.normal(jax.random.key(0), (1, HEADS, LIVE, DIM))
    record = Record(key, key, jnp.where(jnp.arange(LIVE) < LIVE, jnp.arange(LIVE), EMPTY)[None])
    fill = jax.jit(lambda policy: tuple(policy.fill(record, capacity) for _ in range(LAYERS)))
    decode = jax.jit(steps, static_argnames="count", donate_argnums=1)
    query = jax.random.normal(jax.random.key(1), (1, HEADS, GROUPS, DIM))

    def run() -> float:
        caches = jax.block_until_ready(fill(policy))
        begin = time.perf_counter()
        jax.block_until_ready(decode((policy,) * LAYERS, caches, query, LIVE, count=STEPS))
        return time.perf_counter() - begin

    run()  # compiles
    return run
