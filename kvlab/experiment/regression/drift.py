"""How far attention's output moves from the full cache's, by layer and along a continuation (see `run.Decoded.drift`)."""

from pathlib import Path
from typing import Any

import numpy as np

from kvlab.experiment import config

QUARTERS = 4


def figures(cells: list[config.Cell], folder: Path) -> dict[str, dict[str, Any]]:
    """Of each policy whose tasks tell: the mean, `by_layer [L]`, and `by_quarter [4]` of the steps, relative errors all."""
    made = {}
    for label in dict.fromkeys(cell.label for cell in cells):
        arrays = [found for cell in cells if cell.label == label for found in _arrays(folder / cell.run_id)]
        if arrays:
            quarters = [np.mean([part.mean() for part in parts]) for parts in zip(*(np.array_split(a, QUARTERS) for a in arrays))]
            layers = np.mean([a.mean((0, 2)) for a in arrays], 0)
            made[label] = {"mean": float(layers.mean()), "by_layer": layers.tolist(), "by_quarter": [float(q) for q in quarters]}
    return made


def _arrays(run: Path) -> list[np.ndarray]:
    """`[steps, L, B]` of each batch."""
    found = []
    for path in sorted((run / "samples").glob("*.npz")):
        with np.load(path) as arrays:
            if "drift" in arrays:
                found.append(arrays["drift"])
    return found


def table(drifts: dict[str, dict[str, Any]]):
    """As a table for people; None where there is nothing to show."""
    from rich.markup import escape
    from rich.table import Table

    if not drifts:
        return None
    made = Table(
        title="drift", caption="of attention's output from the full cache's, relative to it; quarters of the continuation"
    )
    for column in ("policy", "mean", "most, in layer", "quarters"):
        made.add_column(column, justify="left" if column == "policy" else "right")
    for label, each in drifts.items():
        layer = int(np.argmax(each["by_layer"]))
        quarters = " ".join(f"{q:.4f}" for q in each["by_quarter"])
        made.add_row(escape(label), f"{each['mean']:.4f}", f"{each['by_layer'][layer]:.4f} in {layer}", quarters)
    return made
