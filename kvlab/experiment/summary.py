"""A cell's figures, once all its batches are there."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from kvlab import memory
from kvlab.experiment import causes, config, reads, store
from kvlab.tasks import Task


def finish(cell: config.Cell, place: Path) -> None:
    """Writes the summary of a cell whose batches are all there; whoever does, it is the same."""
    each, task = store.Run(place, cell), cell.make_task()
    if each.numbers() == list(range(task.count())):
        each.finish(summarise(task, each))


def summarise(task: Task, each: store.Run) -> dict[str, Any]:
    """A cell's figures from its batches on disk, so that a resumed run gives what an undisturbed one does."""
    batches = each.batches()
    rows = [row for b in batches for row in b["rows"]]
    steps = np.array([s for b in batches for s in b["timing"]["step_seconds"]])
    samples = sum(b["timing"]["rows"] * len(b["timing"]["step_seconds"]) for b in batches)
    memory_names = [f.name for f in dataclasses.fields(memory.Footprint)] + ["resident_ratio"]
    return {
        "run_id": each.cell.run_id,
        "policy": each.cell.label,
        "task": each.cell.task["name"],
        "seed": each.cell.seed,
        **task.summary(rows),
        **{name: float(np.mean([r[name] for r in rows])) for name in memory_names},
        **{
            name: float(np.mean([r[name] for r in rows]))
            for name in (*reads.COLUMNS, *causes.COLUMNS, "drift")
            if all(name in r for r in rows)
        },
        "tokens_per_s": float(samples / steps.sum()),
        "ms_per_token_p50": float(np.quantile(steps, 0.5) * 1e3),
        "ms_per_token_p99": float(np.quantile(steps, 0.99) * 1e3),
        "time_to_first_token": float(np.median([b["timing"]["time_to_first_token"] for b in batches])),
    }
