"""One point of a search: samples are spent on it until it passes, fails or has no hope.

It passes when every score that the tasks give does, answers and likelihood, and fails when one fails (`sequential.together`).
"""

from collections.abc import Callable

from kvlab.errors import ConfigError
from kvlab.evaluate import sequential, statistics
from kvlab.evaluate.sequential import OPEN, PASS, Plan, Seen
from kvlab.experiment import compare, config, summary
from kvlab.experiment.group import Group
from kvlab.experiment.search import points
from kvlab.experiment.search.points import ANSWERS, Course, Place, Point


class Visit:
    """A point while samples are spent on it.

    Attributes:
      mine, full: samples so far, of the policy and of the full cache. seen: the last look at each measure.
      looks, batches: how many so far.
    """

    def __init__(
        self,
        point: Point,
        course: Course,
        plans: dict[str, Plan],
        margins: config.Margins,
        group: Callable[[config.Cell], Group],
    ):
        self.course, self.plans, self.margins = course, plans, margins
        self.cells = {cell.group: cell for cell in point.cells}
        self.groups: dict[str, Group] = {}
        self.open = group
        self.mine: compare.Samples = {}
        self.full: compare.Samples = {}
        self.seen: dict[str, Seen] = {}
        self.looks = self.batches = 0

    def spend(self, place: Place) -> None:
        """Runs a batch, unless it is there, and takes its samples in."""
        name, index = place
        if name not in self.groups:
            self.groups[name] = self.open(self.cells[name])
        group = self.groups[name]
        group.need(index)
        for each, _ in group.runs:
            into = self.mine if each.cell == self.cells[name] else self.full
            into.update({(name, index, i): row for i, row in enumerate(each.batch(index)["rows"])})
        self.batches += 1

    def finish(self) -> None:
        """Writes the summaries of cells that are complete."""
        for group in self.groups.values():
            for cell in group.cells:
                summary.finish(cell, group.folder)

    def look(self) -> None:
        """Judges every measure that has new samples and has not passed. Errors: ConfigError for a task without a score."""
        self.looks += 1
        for kind, plan in self.plans.items():
            before, share = (self.course.share(number, kind) for number in (self.looks - 1, self.looks))
            if share > before and not (kind in self.seen and self.seen[kind].state == PASS):
                self.seen[kind] = self._judge(kind, plan, plan.shares.index(share))

    def _judge(self, kind: str, plan: Plan, number: int) -> Seen:
        pairs = compare.answer_pairs(self.mine, self.full) if kind == ANSWERS else compare.token_pairs(self.mine)
        if pairs is None:
            names = sorted({cell.task["name"] for cell in self.cells.values() if points.measure(cell) == kind})
            raise ConfigError(f"search: {', '.join(names)} gives neither answers nor likelihoods; take needle or likelihood")
        mine, theirs, clusters = pairs
        if kind == ANSWERS:
            bounds = lambda level: statistics.binary_difference(mine, theirs, clusters, level)
            return sequential.look(bounds, self.margins.accuracy_margin, plan, number)
        bounds = lambda level: statistics.unskewed(mine, theirs, clusters, level)
        return sequential.look(bounds, self.margins.nll_margin, plan, number, worse="higher")

    @property
    def state(self) -> str:
        return sequential.together([seen.state for seen in self.seen.values()]) if self.seen else OPEN

    @property
    def goes_on(self) -> bool:
        """Whether samples are left that could still make it pass."""
        spent_up = any(seen.state == OPEN and seen.chance < sequential.HOPE for seen in self.seen.values())
        return self.state == OPEN and not spent_up and self.looks < self.course.looks
