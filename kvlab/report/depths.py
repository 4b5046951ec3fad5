"""Accuracy by length of the context and depth of what was asked for."""

import dataclasses

from kvlab import parts
from kvlab.evaluate import statistics
from kvlab.experiment.compare import Samples, clusters
from kvlab.report.data import Results, task_of
from kvlab.tasks import TASKS

BINS = 5  # equal parts of a context


@dataclasses.dataclass(frozen=True)
class Spot:
    """The answers of one length and depth: how many, how many right, and the Wilson interval of that share."""

    samples: int
    right: int
    contexts: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.right / self.samples


@dataclasses.dataclass(frozen=True)
class Maps:
    """A task's heat maps: for each policy and length a row of `BINS` spots, None where nothing was asked."""

    task: str
    policies: dict[str, dict[int, list[Spot | None]]]


def maps(results: Results) -> list[Maps]:
    """Every task whose rows know their depth. What is right in part counts as wrong here, as in verdicts."""
    rows = {label: _spots(own) for label, own in results.rows.items()}
    tasks = dict.fromkeys(task for own in rows.values() for task, _, _ in own)
    return [Maps(task, {label: made for label in rows if (made := _map(results, rows[label], task))}) for task in tasks]


def _spots(rows: Samples) -> dict[tuple[str, int, int], Samples]:
    """Rows by task, length and part of the context."""
    groups = {key[0] for key in rows}
    lengths = {group: getattr(parts.build(task_of(group), TASKS, "task"), "length", 0) for group in groups}
    made: dict[tuple[str, int, int], Samples] = {}
    for key, row in rows.items():
        if "correct" in row and "depth" in row:
            part = min(int(row["depth"] * BINS), BINS - 1)
            made.setdefault((task_of(key[0])["name"], lengths[key[0]], part), {})[key] = row
    return made


def _map(results: Results, spots: dict[tuple[str, int, int], Samples], task: str) -> dict[int, list[Spot | None]]:
    lengths = sorted({length for name, length, _ in spots if name == task})
    alpha = results.margins.alpha
    spot = lambda key: _spot(spots[key], alpha) if key in spots else None
    return {length: [spot((task, length, part)) for part in range(BINS)] for length in lengths}


def _spot(rows: Samples, alpha: float) -> Spot:
    right = [bool(row["correct"]) for row in rows.values()]
    names = list(clusters(rows).values())
    share = statistics.proportion(right, names, alpha)
    return Spot(len(right), sum(right), len(set(names)), share.low, share.high)
