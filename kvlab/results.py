"""Results as pandas frames.

kvlab.results.load("results/quickstart")                  a row per sample
kvlab.results.load("results/quickstart", "kept")          a row per (prompt, layer, KV head)
kvlab.results.load("results/quickstart", "entropy")       a row per (sample, step, layer, query head)
kvlab.results.load("results/quickstart", "drift")         a row per (sample, step, layer), where the task has likelihoods
kvlab.results.load("results/quickstart", "cells")         a row per cell
"""

from pathlib import Path

import numpy as np

from kvlab.errors import ResultsError, nearest
from kvlab.experiment import store

TABLES = ("samples", "kept", "entropy", "drift", "cells")


def load(folder: str | Path, table: str = "samples"):
    """A frame of everything finished under a results folder.

    "samples" has, besides the scalars of each sample:

      kept_positions: `[L][H]` arrays of the prompt positions that the cache held once it was filled
      kept_tokens: the same as token strings
      entropy: array `[steps, L, H, G]` in nats, at the steps named by `entropy_steps`
      drift_by_layer: array `[steps, L]`, how far attention's output is from the full cache's, relative to it; None where tasks do
        not feed both the same tokens

    Errors: ResultsError if there is nothing to load.
    """
    import pandas as pd

    if table not in TABLES:
        raise ResultsError(f"table {table!r}; {nearest(table, TABLES)}")
    folder = Path(folder)
    runs = sorted(path.parent for path in folder.glob("*/config.toml"))
    if not runs:
        raise ResultsError(f"{folder} holds no runs; give results/<experiment>, or run an experiment first")
    if table == "cells":
        done = [store.read_json(r / "summary.json") for r in runs if (r / "summary.json").exists()]
        return pd.DataFrame(done)
    strings = _Strings()
    rows = [row for run in runs for row in _samples(run, strings)]
    make = {"samples": lambda r: r, "kept": _kept, "entropy": _entropy, "drift": _drift}[table]
    return pd.DataFrame(make(rows))


class _Strings:
    """Token strings by model, read once."""

    def __init__(self):
        self._known = {}

    def of(self, model: str, ids) -> np.ndarray:
        from kvlab.models import fetch
        from kvlab.models.tokenizer import Tokenizer

        if model not in self._known:
            self._known[model] = Tokenizer(fetch.find(model) / "tokenizer.json")
        return np.array(self._known[model].strings(ids), dtype=object)


def _samples(run: Path, strings: _Strings):
    import tomllib

    import msgspec

    from kvlab.experiment.config import Cell

    cell = msgspec.convert(tomllib.loads((run / "config.toml").read_text(encoding="utf-8")), Cell)
    base = {"run_id": run.name, "policy": cell.label, "task": cell.task["name"], "seed": cell.seed}
    for path in sorted((run / "samples").glob("*.json")):
        batch = store.read_json(path)
        with np.load(path.with_suffix(".npz")) as arrays:  # never pickled: allow_pickle is off by default
            entropy, steps, kept, rows = (arrays[k] for k in ("entropy", "entropy_steps", "kept", "rows"))
            drift = arrays.get("drift")
            prompts = [arrays[f"prompt_{i}"] for i in range(len(kept))]
        tokens = [strings.of(cell.model["name"], ids) for ids in prompts]
        held = [[[head[head >= 0] for head in layer] for layer in prompt] for prompt in kept]
        words = [[[t[head] for head in layer] for layer in prompt] for t, prompt in zip(tokens, held)]
        for i, row in enumerate(batch["rows"]):
            yield {
                **base, "batch": int(path.stem), "sample": i, **row, "prompt": int(rows[i]),
                "kept_positions": held[rows[i]], "kept_tokens": words[rows[i]],
                "entropy_steps": steps, "entropy": entropy[:, :, i],
                "drift_by_layer": None if drift is None else drift[:, :, i],
            }  # fmt: skip


def _kept(samples):
    seen = set()
    for s in samples:
        key = s["run_id"], s["batch"], s["prompt"]
        if key in seen:
            continue
        seen.add(key)
        for layer, heads in enumerate(s["kept_positions"]):
            for head, positions in enumerate(heads):
                yield {
                    "policy": s["policy"], "task": s["task"], "seed": s["seed"], "batch": s["batch"], "prompt": s["prompt"],
                    "layer": layer, "kv_head": head, "kept_positions": positions, "kept_tokens": s["kept_tokens"][layer][head],
                }  # fmt: skip


def _entropy(samples):
    for s in samples:
        for i, step in enumerate(s["entropy_steps"]):
            for layer, kv_head, query_head in np.ndindex(s["entropy"].shape[1:]):
                yield {
                    "policy": s["policy"], "task": s["task"], "seed": s["seed"], "batch": s["batch"], "sample": s["sample"],
                    "step": int(step), "layer": layer, "kv_head": kv_head, "query_head": query_head,
                    "entropy": float(s["entropy"][i, layer, kv_head, query_head]),
                }  # fmt: skip


def _drift(samples):
    for s in samples:
        if s["drift_by_layer"] is None:
            continue
        for step, layer in np.ndindex(s["drift_by_layer"].shape):
            yield {
                "policy": s["policy"], "task": s["task"], "seed": s["seed"], "batch": s["batch"], "sample": s["sample"],
                "step": step, "layer": layer, "drift": float(s["drift_by_layer"][step, layer]),
            }  # fmt: skip
