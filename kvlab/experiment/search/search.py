"""`kvlab run FILE --search`: the most aggressive value of one setting that still costs less than the margin.

Quality is taken to fall along the values, so they are bisected (`sequential.bisect`). At each value the policy is compared with
the full cache on the same samples, batch after batch, and looked at several times (`visit.py`). Cells and batches are those of
`kvlab run`, so nothing finished is computed again, and a search that was stopped goes on the way it went.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab import compilation
from kvlab.evaluate import sequential
from kvlab.evaluate.sequential import FAIL, Plan, Seen
from kvlab.experiment import config, report, run, sharing, store
from kvlab.experiment.group import Group
from kvlab.experiment.kept import Kept
from kvlab.experiment.regression import judge
from kvlab.experiment.search import points
from kvlab.experiment.search.points import ANSWERS, Course, Point
from kvlab.experiment.search.visit import Visit

CODE = {judge.PASS: 0, judge.FAIL: 1, judge.OPEN: 3}  # exit codes
KEEP = 1 << 30  # bytes of prompts and of the full cache's answers that stay for the next value


@dataclasses.dataclass(frozen=True)
class Visited:
    """What a point showed: `seen` by measure; `level` of its pass, over all looks; batches and samples spent, and decode programs
    compiled, the full cache's among them."""

    name: str
    value: Any
    state: str
    level: float
    looks: int
    batches: int
    samples: int
    programs: int
    seen: dict[str, Seen]


@dataclasses.dataclass(frozen=True)
class Found:
    """Where the search ended: `passed` is the index of the value that it returns, −1 for none; `visited` by index, in order."""

    search: points.Search
    names: list[str]
    margins: config.Margins
    passed: int
    visited: dict[int, Visited]
    batches: int  # of a point that is looked at to the end
    folder: Path

    @property
    def outcome(self) -> str:
        if self.passed >= 0:
            return judge.PASS
        return judge.FAIL if self.visited[0].state == FAIL else judge.OPEN


def search(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
    retry: bool = False,
) -> Found:
    """Searches as a file's [search] table says; arguments and resuming as in `kvlab.run`.

    Writes search.json and search.png beside the cells. Errors: KvlabError with one clear line; finished batches stay.
    """
    from kvlab.experiment.search import answer, answer_picture

    name, experiment = config.read(source)
    asked, made = points.read(experiment, overrides, smoke)
    folder = run.folder(name, Path(out), smoke)
    with report.progress() as bar:
        driver = Driver(asked, made, experiment.margins, folder, accept_stale, bar)
        run.prepare(driver.cells, folder, fresh, retry)
        with sharing.at_work(folder):
            passed = sequential.bisect(len(made), experiment.margins.alpha, driver.visit)
    names = [point.name for point in made]
    found = Found(asked, names, experiment.margins, passed, driver.visited, driver.course.batches, folder)
    store.write_text(folder / "search.json", json.dumps(answer.as_json(found), indent=1))
    answer_picture.draw(found, folder / "search.png")
    return found


class Driver:
    """Visits points, on the same samples and with what they share."""

    def __init__(
        self, asked: points.Search, made: list[Point], margins: config.Margins, folder: Path, accept_stale: bool, bar: Any
    ):
        self.points, self.margins, self.folder, self.accept_stale, self.bar = made, margins, folder, accept_stale, bar
        self.course = Course(made[0].cells, asked.looks)
        self.full = {cell.group: config.Cell(cell.model, cell.task, {"label": "full"}, (), cell.seed) for cell in made[0].cells}
        self.kept = Kept(KEEP)
        self.visited: dict[int, Visited] = {}

    @property
    def cells(self) -> list[config.Cell]:
        """Those of all points, and the full cache's."""
        return [*self.full.values(), *(cell for point in self.points for cell in point.cells)]

    def visit(self, index: int, level: float) -> str:
        """Spends samples on a point until more are of no use, and says its state."""
        point = self.points[index]
        task = self.bar.add_task(point.name, total=self.course.batches)
        each = Visit(point, self.course, self.plans(level), self.margins, self.group)
        with compilation.counting("decode") as programs:
            while each.goes_on:
                for place in self.course.added(each.looks + 1):
                    each.spend(place)
                    self.bar.update(task, advance=1)
                each.look()
        each.finish()
        spent = each.looks, each.batches, len(each.mine), len(programs)
        self.visited[index] = Visited(point.name, point.value, each.state, level, *spent, each.seen)
        return each.state

    def group(self, cell: config.Cell) -> Group:
        """A point's cell, and the full cache's where answers are compared with it."""
        cells = [cell, self.full[cell.group]] if points.measure(cell) == ANSWERS else [cell]
        return Group(cells, self.folder, self.accept_stale, lambda label: None, self.kept)

    def plans(self, level: float) -> dict[str, Plan]:
        """When each measure is looked at, and its levels: a pass takes all measures, a fail one, so these share theirs."""
        failing = self.margins.alpha / sequential.depth(len(self.points)) / len(self.course.measures)
        return {kind: Plan.of(self.course.shares(kind), level, failing) for kind in self.course.measures}
