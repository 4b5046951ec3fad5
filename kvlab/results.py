"""Results as pandas frames.

kvlab.results.load("results/quickstart")                  a row per sample
kvlab.results.load("results/quickstart", "kept")          a row per (prompt, layer, KV head)
kvlab.results.load("results/quickstart", "entropy")       a row per (sample, step, layer, query head)
kvlab.results.load("results/quickstart", "drift")         a row per (sample, step, layer), where the task has likelihoods
kvlab.results.load("results/quickstart", "cells")         a row per cell

Rows of one (run_id, batch, sample) belong together across the tables; `paired` puts the full cache's row beside each. Kept
positions become a mask, or a coloured text, with `kvlab.experiment.survivors`.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import ConfigError, ResultsError, nearest
from kvlab.experiment import store

TABLES = ("samples", "kept", "entropy", "drift", "cells")
ABOUT = ("run_id", "group", "model", "policy", "full", "task", "length", "seed")
KEYS = ("group", "batch", "sample", "prompt", "step", "layer", "kv_head", "query_head")  # of a row, whatever the policy


def load(folder: str | Path, table: str = "samples"):
    """A frame of everything finished under a results folder.

    Every table says of each row's cell: `run_id`, the folder of that name; `group`, alike where cells saw the same prompts;
    `model`, `policy`, `task`, its `length` in tokens (None where it has none), `seed`; and whether it is the `full` cache.

    "samples" has, besides the scalars of each sample:

      prompt_tokens: strings of the prompt's tokens
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
        done = [r for r in runs if (r / "summary.json").exists()]
        return pd.DataFrame([{**about(_cell(r)), **store.read_json(r / "summary.json")} for r in done])
    strings = _Strings()
    rows = [row for run in runs for row in _samples(run, strings)]
    make = {"samples": lambda r: r, "kept": _kept, "entropy": _entropy, "drift": _drift}[table]
    return pd.DataFrame(make(rows))


def paired(frame):
    """Every row of a table whose cell's group has a full cache too: its columns, and the full cache's with "_full" behind.

    Takes any table but "cells", with columns of your own or without. Errors: ResultsError without a full cache.
    """
    keys = [name for name in KEYS if name in frame]
    reference = frame[frame["full"]].drop_duplicates(keys)
    if reference.empty:
        raise ResultsError('no full cache among these rows; add { label = "full" } to the policies of the grid and run again')
    return frame.merge(reference, on=keys, suffixes=("", "_full"), validate="many_to_one")


def clusters(frame) -> list[tuple]:
    """The context of each row, for intervals and verdicts of `kvlab.evaluate`: its `context` where it has one, else its batch.

    Contexts of another model, task or seed are others; those of the same seed at another length are not.
    """
    context = frame["context"].fillna(frame["batch"]) if "context" in frame else frame["batch"]
    return list(zip(frame["model"], frame["task"], frame["seed"], context))


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


def _cell(run: Path):
    """The cell of a run's folder."""
    import tomllib

    import msgspec

    from kvlab.experiment.config import Cell

    return msgspec.convert(tomllib.loads((run / "config.toml").read_text(encoding="utf-8")), Cell)


def about(cell) -> dict[str, Any]:
    """The columns that say which cell (`kvlab.experiment.config.Cell`) a row is of."""
    from kvlab import parts
    from kvlab.experiment.compare import is_full
    from kvlab.tasks import TASKS

    try:
        full, kind = is_full(cell), parts.find(cell.task["name"], TASKS, "task")
    except ConfigError:  # a part or task of somebody's own, which need not be at hand where its results are read
        full, kind = False, None
    return {
        "run_id": cell.run_id, "group": hashlib.sha256(cell.group.encode()).hexdigest()[:12], "model": cell.model["name"],
        "policy": cell.label, "full": full, "task": cell.task["name"],
        "length": cell.task.get("length", getattr(kind, "length", None)), "seed": cell.seed,
    }  # fmt: skip


def _samples(run: Path, strings: _Strings):
    cell = _cell(run)
    base = about(cell)
    for path in sorted((run / "samples").glob("*.json")):
        batch = store.read_json(path)
        with np.load(path.with_suffix(".npz")) as arrays:  # never pickled: allow_pickle is off by default
            entropy, steps, kept, rows = (arrays[k] for k in ("entropy", "entropy_steps", "kept", "rows"))
            drift = arrays.get("drift")
            prompts = [arrays[f"prompt_{i}"] for i in range(len(kept))]
        tokens = [strings.of(cell.model["name"], ids) for ids in prompts]
        stored = [[[head[head >= 0] for head in layer] for layer in prompt] for prompt in kept]
        words = [[[t[head] for head in layer] for layer in prompt] for t, prompt in zip(tokens, stored)]
        for i, row in enumerate(batch["rows"]):
            yield {
                **base, "batch": int(path.stem), "sample": i, **row, "prompt": int(rows[i]),
                "prompt_tokens": tokens[rows[i]], "kept_positions": stored[rows[i]], "kept_tokens": words[rows[i]],
                "entropy_steps": steps, "entropy": entropy[:, :, i],
                "drift_by_layer": None if drift is None else drift[:, :, i],
            }  # fmt: skip


def _of(sample) -> dict[str, Any]:
    return {name: sample[name] for name in ABOUT}


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
                    **_of(s), "batch": s["batch"], "prompt": s["prompt"],
                    "layer": layer, "kv_head": head, "kept_positions": positions, "kept_tokens": s["kept_tokens"][layer][head],
                }  # fmt: skip


def _entropy(samples):
    import pandas as pd

    made = []
    for s in samples:
        step, layer, kv_head, query_head = np.indices(s["entropy"].shape).reshape(4, -1)
        place = {"step": s["entropy_steps"][step], "layer": layer, "kv_head": kv_head, "query_head": query_head}
        whose = {**_of(s), "batch": s["batch"], "sample": s["sample"]}
        made.append(pd.DataFrame({**whose, **place, "entropy": s["entropy"].ravel().astype(float)}))
    return pd.concat(made, ignore_index=True) if made else pd.DataFrame()


def _drift(samples):
    for s in samples:
        if s["drift_by_layer"] is None:
            continue
        for step, layer in np.ndindex(s["drift_by_layer"].shape):
            yield {
                **_of(s), "batch": s["batch"], "sample": s["sample"],
                "step": step, "layer": layer, "drift": float(s["drift_by_layer"][step, layer]),
            }  # fmt: skip
