"""How much each layer suffers when it alone is sparse: written by an experiment over `layers.only`, read by `layers.from`.

ranking.json   {"model": …, "policy": …, "measure": "kl_mean", "layers": [{"layer": 7, "kl_mean": 0.031, …}, …]}
               the most sensitive first
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvlab import parts
from kvlab.experiment import store
from kvlab.experiment.config import Cell

FILE = "ranking.json"
MEASURE = "kl_mean"
FIGURES = (MEASURE, "delta_nll", "same_top1", "accuracy", "read_ratio")


def write(cells: Iterable[Cell], folder: Path) -> Path | None:
    """Ranks the layers that finished cells made sparse alone; None where there are none, or several models or policies.

    A layer's damage is the mean KL divergence from the full cache, over tasks and seeds; ties go by number.
    """
    alone = [(layer, cell) for cell in cells if (layer := cell.single_layer) is not None]
    if len({json.dumps((cell.model, cell.policy), sort_keys=True) for _, cell in alone}) != 1:
        return None
    summaries: dict[int, list[dict[str, Any]]] = {}
    for layer, cell in alone:
        summaries.setdefault(layer, []).append(store.read_json(folder / cell.run_id / "summary.json"))
    layers = ranked(summaries)
    if not layers:
        return None
    cell = alone[0][1]
    about = {"model": cell.model["name"], "policy": parts.describe(cell.policy), "measure": MEASURE, "layers": layers}
    store.write_text(folder / FILE, json.dumps(about, indent=1))
    return folder / FILE


def ranked(summaries: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Layers with the means of their figures, the most sensitive first; none if the measure is missing."""
    rows = []
    for layer, found in summaries.items():
        values = {name: [s[name] for s in found if name in s and math.isfinite(s[name])] for name in FIGURES}
        rows.append({"layer": layer, **{name: sum(v) / len(v) for name, v in values.items() if v}})
    if not all(MEASURE in row for row in rows):
        return []
    return sorted(rows, key=lambda row: (-row[MEASURE], row["layer"]))
