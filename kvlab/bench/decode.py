"""How fast the full fp32 cache decodes, against transformers and against what memory gives on the same arrays.

Three probes are interleaved with the steps: a matrix–vector product over every weight (what a step cannot do without),
a sum over weights and cache (what the machine reads), and transformers' step with its DynamicCache.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import memory, parts
from kvlab.bench.peers import Peer, cropped
from kvlab.decode import Engine
from kvlab.models import load


def main(model: str, prompt: int, batch: int, tokens: int, pairs: int, peers: bool) -> dict:
    engine = Engine(load(model))
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, (batch, prompt))
    engine.prefill(ids.tolist())  # compiles
    filled = engine.prefill(ids.tolist())
    session = engine.start(filled, parts.policy({}), tokens * (pairs + 1))
    session.run(tokens)  # compiles
    weights = jax.tree.leaves(engine.model.params)
    jax.block_until_ready((_matvecs(weights), _sums(weights, session.state.caches)))
    cache_bytes = memory.resident(session.state.caches)
    weight_bytes = memory.resident(weights)
    peer = Peer(model) if peers else None
    if peer:
        first, cache, _ = peer.prefill(ids)
        with cropped(cache, prompt):
            peer.decode(cache, first.argmax(-1), 2)
    rows: dict[str, list[float]] = {k: [] for k in ("step", "matvec", "read", "prefill", "peer_step", "peer_prefill")}
    for i in range(pairs):
        rows["step"].append(_time(lambda: session.run(tokens)) / tokens)
        rows["matvec"].append(_time(lambda: _matvecs(weights)))
        rows["read"].append(_time(lambda: _sums(weights, session.state.caches)))
        if peer:
            with cropped(cache, prompt):
                rows["peer_step"].append(float(np.median(peer.decode(cache, first.argmax(-1), 8)[1])))
        if i < 3:
            rows["prefill"].append(engine.prefill(ids.tolist()).seconds)
            if peer:
                rows["peer_prefill"].append(peer.prefill(ids)[2])
    return _figures(rows, weight_bytes, cache_bytes, batch, prompt)


def _figures(rows, weight_bytes: int, cache_bytes: int, batch: int, prompt: int) -> dict:
    step, matvec, read = (np.array(rows[k]) for k in ("step", "matvec", "read"))
    used = (weight_bytes + cache_bytes) / step
    figures = {
        "batch": batch,
        "prompt": prompt,
        "step_ms": float(np.median(step) * 1e3),
        "tokens_per_s": float(batch / np.median(step)),
        "prefill_tokens_per_s": float(batch * prompt / np.median(rows["prefill"])),
        "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
        "matvec_gb_per_s": float(np.median(weight_bytes / matvec) / 1e9),
        "read_gb_per_s": float(np.median((weight_bytes + cache_bytes) / read) / 1e9),
        "fraction_of_matvec": float(np.median(used / (weight_bytes / matvec))),
        "fraction_of_read_bandwidth": float(np.median(used / ((weight_bytes + cache_bytes) / read))),
    }
    if rows["peer_step"]:
        figures["transformers_step_ms"] = float(np.median(rows["peer_step"]) * 1e3)
        figures["ratio_transformers"] = float(np.median(np.array(rows["peer_step"]) / step))
        figures["prefill_ratio"] = float(np.median(np.array(rows["peer_prefill"]) / rows["prefill"]))
    for name, value in figures.items():
        print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value:,}")
    return figures


def _time(work) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begin


@jax.jit
def _matvecs(weights):
    return [w @ jnp.ones(w.shape[1]) for w in weights if w.ndim == 2]


@jax.jit
def _sums(weights, caches):
    total = lambda x: x.sum(dtype=jnp.float32)
    return sum(map(total, weights)) + sum(map(total, jax.tree.leaves(caches)))
