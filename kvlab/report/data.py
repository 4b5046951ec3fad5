"""From a results folder to what the page shows: finished cells, their rows, and a figure per policy."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvlab import parts
from kvlab.errors import ResultsError
from kvlab.experiment import compare, config, report, store
from kvlab.experiment.compare import Samples

NAMED = ("name", "length")  # options that a task's words always have


class Stored(config.Cell, frozen=True, kw_only=True):
    """A cell by the name that its folder has: an older kvlab may have hashed other fields."""

    place: str

    @property
    def run_id(self) -> str:
        return self.place


@dataclasses.dataclass(frozen=True)
class Results:
    """A results folder.

    Attributes:
      experiment: as it was run; with an empty question where the folder does not say.
      cells: those that are finished; unfinished: how many are not.
      rows: the samples of each policy, by label; reference: the full cache's, empty where there is none.
      frame: a row per policy, as `kvlab.run` returns it.
    """

    folder: Path
    experiment: config.Experiment
    cells: Sequence[config.Cell]
    unfinished: int
    rows: dict[str, Samples]
    reference: Samples
    frame: Any

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def margins(self) -> config.Margins:
        return self.experiment.margins

    @property
    def full(self) -> list[str]:
        """Labels of the full cache."""
        return [label for label in self.rows if all(compare.is_full(cell) for cell in self.of(label))]

    def of(self, label: str) -> list[config.Cell]:
        return [cell for cell in self.cells if cell.label == label]

    def runs(self) -> Iterable[tuple[config.Cell, Path]]:
        """Every finished cell with its folder."""
        return ((cell, self.folder / cell.run_id) for cell in self.cells)


def read(folder: str | Path) -> Results:
    """Errors: ResultsError for a folder without a finished cell, ConfigError for an experiment.toml that is none."""
    import pandas as pd

    folder = Path(folder)
    experiment = _experiment(folder)
    runs = _runs(folder, experiment.origin)
    done = [run for run in runs if (run / "summary.json").exists()]
    if not done:
        begun = f"{len(runs)} cells and none is finished; run the experiment again, it goes on" if runs else "no runs"
        raise ResultsError(f"{folder} holds {begun}; give results/<experiment> of an experiment that has been run")
    cells = [_cell(run) for run in done]
    labels = dict.fromkeys(cell.label for cell in cells)
    rows = {label: compare.samples([c for c in cells if c.label == label], folder) for label in labels}
    reference = compare.samples(list(filter(compare.is_full, cells)), folder)
    table = pd.DataFrame([store.read_json(run / "summary.json") for run in done])
    frame = report.with_verdicts(report.by_policy(table), compare.columns(cells, folder, experiment.margins))
    return Results(folder, experiment, cells, len(runs) - len(done), rows, reference, frame)


def _experiment(folder: Path) -> config.Experiment:
    path = folder / store.EXPERIMENT
    return config.read(path)[1] if path.exists() else config.Experiment("")


def _runs(folder: Path, origin: config.Origin | None) -> list[Path]:
    """Folders of the cells that the last run was about, in its order; of an older folder all, in its table's."""
    if origin is not None:
        return [folder / name for name in origin.cells]
    known = sorted(path.parent.name for path in folder.glob("*/config.toml"))
    order = _order(folder)
    return [folder / name for name in sorted(known, key=lambda name: order.get(name, len(order)))]


def _order(folder: Path) -> dict[str, int]:
    """The places of the cells in the table, as far as it has them."""
    import pandas as pd

    path = folder / "table.parquet"
    return {name: i for i, name in enumerate(pd.read_parquet(path)["run_id"])} if path.exists() else {}


def _cell(run: Path) -> config.Cell:
    path = run / "config.toml"
    return config.convert({**parts.read_toml(path), "place": run.name}, Stored, str(path))


def task_of(group: str) -> dict[str, Any]:
    """The task of a cell's group."""
    return json.loads(group)[1]


def seed_words(cells: Iterable[config.Cell]) -> dict[str, str]:
    """For each group of cells ", seed 3" where there are several, else nothing."""
    seeds = {cell.group: cell.seed for cell in cells}
    several = len(set(seeds.values())) > 1
    return {group: f", seed {seed}" if several else "" for group, seed in seeds.items()}


def task_words(cells: Iterable[config.Cell]) -> dict[str, str]:
    """For each group of cells its task in words: name, length and whatever else sets tasks of that name apart."""
    tasks = {cell.group: cell.task for cell in cells}

    def apart(task: dict[str, Any], option: str) -> bool:
        return len({str(other.get(option)) for other in tasks.values() if other["name"] == task["name"]}) > 1

    def words(task: dict[str, Any]) -> str:
        size = f", {task['length']:,} tokens" if isinstance(task.get("length"), int) else ""
        return task["name"] + size + "".join(f", {o} {task[o]}" for o in task if o not in NAMED and apart(task, o))

    return {group: words(task) for group, task in tasks.items()}
