"""A results folder as TensorBoard scalars, through tensorboardX (extra `tensorboard`).

A run for each policy. In it: figures/… the columns of the table, at step 0; layers/… a figure by layer, the layer as the step;
batches/… accuracy and time of each batch, in order, as the step.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import ResultsError
from kvlab.experiment import store
from kvlab.report import data, layers
from kvlab.report.data import Results


def write(folder: str | Path, out: str | Path) -> list[Path]:
    """Writes the runs and returns their folders. Errors: ResultsError, also where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ResultsError("--tensorboard needs the extra 'tensorboard'; write: pip install tensorboardX") from error
    results = data.read(folder)
    by_layer = {"entropy": layers.entropy(results), "drift": layers.drifts(results)}
    made = []
    for label, name in names(list(results.rows)).items():
        with SummaryWriter(str(Path(out) / name)) as writer:
            for tag, step, value in [*_figures(results, label), *_layers(by_layer, label), *_batches(results, label)]:
                writer.add_scalar(tag, value, step)
        made.append(Path(out) / name)
    return made


def names(labels: list[str]) -> dict[str, str]:
    """A folder's name for each policy; none twice."""
    made: dict[str, str] = {}
    for label in labels:
        plain = re.sub(r"[^\w.+%-]+", "_", label).strip("._") or "policy"
        number = sum(re.sub(r"~\d+$", "", other) == plain for other in made.values())
        made[label] = f"{plain}~{number + 1}" if number else plain
    return made


def _figures(results: Results, label: str):
    row = results.frame[results.frame["policy"] == label].iloc[0].drop("policy")
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float | np.number)}
    return [(f"figures/{name}", 0, float(value)) for name, value in numbers.items() if math.isfinite(value)]


def _layers(by_layer: dict[str, layers.Series], label: str):
    """Where several models have the policy, each has its own tag, for its name stands before the label."""
    for what, series in by_layer.items():
        for name, values in series.items():
            if name == label or name.endswith(f": {label}"):
                tag = f"layers/{what}/{name.removesuffix(label).removesuffix(': ')}".rstrip("/")
                yield from ((tag, layer, value) for layer, value in enumerate(values))


def _batches(results: Results, label: str):
    tasks = data.task_words(results.cells)
    steps: dict[str, int] = {}
    for cell in results.of(label):
        task = re.sub(r"[^\w.-]+", "_", tasks[cell.group])
        for batch in store.Run(results.folder, cell).batches():
            step = steps[task] = steps.get(task, -1) + 1
            yield from ((f"batches/{task}/{name}", step, value) for name, value in _batch(batch).items())


def _batch(batch: dict[str, Any]) -> dict[str, float]:
    timing, right = batch["timing"], [row["correct"] for row in batch["rows"] if "correct" in row]
    made = {"ms_per_token": 1e3 * float(np.mean(timing["step_seconds"])), "time_to_first_token": timing["time_to_first_token"]}
    return made | ({"accuracy": float(np.mean(right))} if right else {})
