"""Figures by layer: the entropy of attention, and how far its output drifts from the full cache's."""

from pathlib import Path

import numpy as np

from kvlab.experiment import config
from kvlab.experiment.regression import drift
from kvlab.report.data import Results

Series = dict[str, list[float]]  # policy → a figure per layer


def entropy(results: Results) -> Series:
    """Mean over steps, samples and query heads, in nats, of every policy by layer; batches count alike."""
    return _by_model(results, lambda cells: _entropy(cells, results.folder))


def drifts(results: Results) -> Series:
    """Of the policies whose tasks tell: see `drift.py`. The full cache's own, which is 0, is left out."""
    found = _by_model(results, lambda cells: {k: each["by_layer"] for k, each in drift.figures(cells, results.folder).items()})
    return {label: layers for label, layers in found.items() if any(layers)}


def _by_model(results: Results, make) -> Series:
    """What `make` says of each model's cells; the model's name stands before the policy where there are several."""
    models = list(dict.fromkeys(cell.model["name"] for cell in results.cells))
    made: Series = {}
    for model in models:
        before = f"{model}: " if len(models) > 1 else ""
        for label, layers in make([cell for cell in results.cells if cell.model["name"] == model]).items():
            made[before + label] = layers
    return made


def _entropy(cells: list[config.Cell], folder: Path) -> Series:
    made: Series = {}
    for label in dict.fromkeys(cell.label for cell in cells):
        found = [each for cell in cells if cell.label == label for each in _batches(folder / cell.run_id)]
        if found:
            made[label] = np.mean(found, 0).tolist()
    return made


def _batches(run: Path) -> list[np.ndarray]:
    """`[L]` of each batch."""
    found = []
    for path in sorted((run / "samples").glob("*.npz")):
        with np.load(path) as arrays:
            found.append(arrays["entropy"].mean((0, 2, 3, 4), np.float64))
    return found
