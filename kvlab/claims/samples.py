"""The samples of a finished experiment, paired between policies, as tests of claims look at them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvlab.errors import ConfigError, ResultsError, nearest
from kvlab.evaluate import statistics, trend
from kvlab.evaluate.statistics import Estimate
from kvlab.experiment import config, store
from kvlab.tasks import Task


class Sample(NamedTuple):
    """A row of the results; `task` and its `name` say what was asked, `cluster` which context or document it comes from."""

    row: dict[str, Any]
    name: str
    task: Task
    cluster: Any


Table = dict[str, dict[tuple, Sample]]  # label of a policy → (group of the cell, batch, place in it) → sample

BINARY = "correct"
# what is worse the larger it is: of one row; other columns are taken as they are
BADNESS = {
    BINARY: lambda row: 1.0 - row[BINARY],
    "nll": lambda row: float(np.mean(row["nll"])),
    "kl": lambda row: float(np.mean(row["kl"])),
    "same_top1": lambda row: 1.0 - float(np.mean(row["same_top1"])),
}
UNITS = {BINARY: "points", "same_top1": "points"}  # others in nats, unless they are ratios
RATIOS = ("drift", "read_ratio", "read_ratio_gated", "realised_sparsity", "kept_share", "read_share", "share")


def read(cells: Sequence[config.Cell], folder: Path, entropy: bool) -> Table:
    """All samples by policy. With `entropy` each row has `entropy_by_layer [L]`, the mean over the steps kept and the heads."""
    table: Table = {}
    for cell in cells:
        own, task = table.setdefault(cell.label, {}), cell.make_task()
        for index, batch in enumerate(store.Run(folder, cell).batches()):
            layers = _entropy(folder / cell.run_id / "samples" / f"{index:05d}.npz") if entropy else None
            for i, row in enumerate(batch["rows"]):
                row = row if layers is None else {**row, "entropy_by_layer": layers[i]}
                # the same seed draws from the same texts, whatever the task's length, so that is one cluster
                draw = (cell.seed, row.get("context", index))
                cluster = (cell.model.get("name"), cell.task["name"], row.get("document", draw))
                own[cell.group, index, i] = Sample(row, cell.task["name"], task, cluster)
    return table


def _entropy(path: Path) -> np.ndarray:
    """`[B, L]` of one batch."""
    with np.load(path) as arrays:
        return arrays["entropy"].mean((0, 3, 4)).T.astype(float)


class Pairs(NamedTuple):
    """Values `[n, policies]` of the same samples under several policies, the larger the worse."""

    values: np.ndarray
    samples: list[Sample]

    @property
    def clusters(self) -> list[Any]:
        return [sample.cluster for sample in self.samples]


def fits(sample: Sample, where: dict[str, Any]) -> bool:
    return all(value == (sample.name if key == "name" else getattr(sample.task, key, None)) for key, value in where.items())


def paired(table: Table, labels: Sequence[str], measure: str, where: dict[str, Any]) -> Pairs:
    """The samples that all of the policies have and that have the measure. Errors: ResultsError if there are none."""
    of = BADNESS.get(measure, lambda row: float(row[measure]))
    first, *others = (table[label] for label in labels)
    keys = [
        key
        for key, sample in first.items()
        if fits(sample, where) and all(key in other for other in others) and measure in sample.row
    ]
    if not keys:
        raise ResultsError(
            f"no sample of {', '.join(map(repr, labels))} has {measure!r} where {where or 'anything'}; "
            "likelihood has nll, kl, same_top1 and drift, tasks with answers have correct"
        )
    values = np.array([[of(table[label][key].row) for label in labels] for key in keys])
    return Pairs(values, [first[key] for key in keys])


def unit(measure: str) -> str:
    return UNITS.get(measure, "" if measure in RATIOS else "nats")


def show(value: float, unit: str) -> str:
    """A signed figure: shares in points, others with three digits that count."""
    if unit == "points":
        return f"{100 * value:+.1f}"
    return f"{value:+.4f}" if abs(value) >= 0.01 else f"{value:+.2g}"


def interval(estimate: Estimate, unit: str) -> str:
    return f"{show(estimate.value, unit)} [{show(estimate.low, unit)}, {show(estimate.high, unit)}]" + (
        f" {unit}" if unit else ""
    )


def covariate(sample: Sample, names: Sequence[str]) -> float:
    """The sum of columns of the sample or fields of its task. Errors: ConfigError for a name that is neither."""
    total = 0.0
    for name in names:
        value = sample.row.get(name, getattr(sample.task, name, None))
        if not isinstance(value, int | float):
            known = {k for k, v in {**vars(sample.task), **sample.row}.items() if isinstance(v, int | float)}
            raise ConfigError(f"trend: covariate {name!r} is no number of {sample.name}; {nearest(name, known)}")
        total += value
    return total


# What is right or wrong seldom differs, and a resample of few events is narrow by luck: two clusters more, one with a gain and
# one with a loss, as in Agresti & Min (2005, https://doi.org/10.1002/sim.1781), who add half an event to each kind of pair.


def mean(values, clusters, measure: str, alpha: float) -> Estimate:
    """The mean of paired differences with its interval, in the measure's unit."""
    values, names = np.asarray(values, float), list(clusters)
    if measure == BINARY:
        values, names = np.append(values, [1.0, -1.0]), [*names, "a gain", "a loss"]
    return _of(clusters, statistics.mean_difference(values, np.zeros_like(values), names, alpha))


def slope(x, values, clusters, measure: str, alpha: float, relative: bool) -> Estimate:
    """The slope of paired differences over a covariate with its interval; events are added at both of its ends."""
    x, values, names = np.asarray(x, float), np.asarray(values, float), list(clusters)
    if measure == BINARY:
        x = np.append(x, [x.min(), x.min(), x.max(), x.max()])
        values = np.append(values, [1.0, -1.0, 1.0, -1.0])
        names += ["first gain", "first loss", "last gain", "last loss"]
    return _of(clusters, trend.slope(x, values, names, alpha, relative))


def _of(clusters, estimate: Estimate) -> Estimate:
    """The estimate with the numbers of what was really seen."""
    return estimate._replace(items=len(clusters), clusters=len(set(clusters)))
