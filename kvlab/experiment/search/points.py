"""What a search asks: the [search] table, a point for each value, and the order in which samples are spent.

[search]
path   = "policy.selection.sparsity"     dotted path in a cell, in policy or layers
values = [0.5, 0.7, 0.9]                 from the mildest to the most aggressive: numbers, names or tables
looks  = 6                               how often a point is looked at, at most

The file's grid gives tasks and seeds, [verdict] the margins.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvlab import parts
from kvlab.errors import ConfigError
from kvlab.experiment import compare, config
from kvlab.experiment.layers import Choice

ANSWERS, LIKELIHOOD = "answers", "likelihood"
VARIED = ("policy", "layers")
MOST_LOOKS = 50
Place = tuple[str, int]  # a group of cells and one of its batches


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table as it stands."""

    path: str
    values: list[Any]
    looks: int = 6

    def __post_init__(self):
        if self.path.partition(".")[0] not in VARIED or not self.path.partition(".")[2]:
            raise ConfigError(
                f'search: path = "{self.path}"; allowed: a dotted path in policy or layers, such as "policy.selection.sparsity": '
                "another model, task or seed would be other samples"
            )
        if len(self.values) < 2:
            raise ConfigError(f"search: values = {self.values}; give two or more, from the mildest to the most aggressive")
        if not 1 <= self.looks <= MOST_LOOKS:
            raise ConfigError(f"search: looks = {self.looks}; allowed: 1 … {MOST_LOOKS}")


@dataclasses.dataclass(frozen=True)
class Point:
    """A value, its name in tables, and its cells, one for each task and seed."""

    value: Any
    name: str
    cells: tuple[config.Cell, ...]


def read(experiment: config.Experiment, overrides: Sequence[str] = (), smoke: bool = False) -> tuple[Search, list[Point]]:
    """The table with its overrides ("search.values" and so on), and its points. Errors: ConfigError."""
    if experiment.search is None:
        raise ConfigError('no [search] table; write one: path = "policy.selection.sparsity", values = [0.5, 0.7, 0.9]')
    changes = [*(experiment.smoke.items() if smoke else ()), *map(config.parse_override, overrides)]
    changed = {path.removeprefix(config.SEARCH): value for path, value in changes if path.startswith(config.SEARCH)}
    search = config.convert({**experiment.search, **changed}, Search, "search")
    for axis in [*experiment.grid, *experiment.zip]:
        if axis.partition(".")[0] not in ("task", "seed"):
            raise ConfigError(f"search: the grid varies {axis}; allowed: task and seed. Put what all points share into [base]")
    search = msgspec.structs.replace(search, values=_alike(search.values))
    points = [_point(experiment, search, value, overrides, smoke) for value in search.values]
    _check(search, points)
    return search, points


def _alike(values: list[Any]) -> list[Any]:
    """Whole numbers among others as floats: an int leaf would be another program than a float one."""
    return [float(value) for value in values] if {type(value) for value in values} == {int, float} else values


def _point(experiment: config.Experiment, search: Search, value: Any, overrides: Sequence[str], smoke: bool) -> Point:
    made = msgspec.structs.replace(experiment, grid={**experiment.grid, search.path: [value]})
    last = search.path.rpartition(".")[2]
    text = parts.describe({last: value}) if last in parts.KINDS else parts.describe({"codec": value, "label": str(value)})
    return Point(value, f"{last} {text}", tuple(config.expand(made, overrides, smoke)))


def _check(search: Search, points: list[Point]) -> None:
    """Errors: ConfigError for values that are the same policy, or the full cache, and for tasks without a score."""
    seen: dict[str, Any] = {}
    for point in points:
        policy = _policy(point.cells[0])
        if policy in seen:
            raise ConfigError(
                f"search: the values {seen[policy]!r} and {point.value!r} give the same policy; leave one out, and set "
                f"{search.path} nowhere else"
            )
        if compare.is_full(point.cells[0]):
            raise ConfigError(
                f"search: the value {point.value!r} gives the full cache, which all are compared with; leave it out"
            )
        seen[policy] = point.value
    for cell in points[0].cells:
        if cell.task["name"] == "continuation":
            raise ConfigError("search: continuation has neither answers nor likelihood with a margin; take needle or likelihood")


def _policy(cell: config.Cell) -> str:
    """The same text for the same policy, however its tables are written."""
    if isinstance(cell.layers, Choice):
        return repr((parts.policy(cell.policy), cell.layers))
    return repr((parts.policy(cell.policy), [(o.range, parts.policy({**cell.policy, **o.policy})) for o in cell.layers]))


def measure(cell: config.Cell) -> str:
    """What a cell's samples are judged by."""
    return LIKELIHOOD if cell.make_task().compares_logits else ANSWERS


class Course:
    """The order in which a point's samples are spent: the batches of every task in turn over the seeds, each look its share."""

    def __init__(self, cells: Iterable[config.Cell], looks: int):
        self.looks = looks
        tasks: dict[str, list[config.Cell]] = {}
        for cell in cells:
            tasks.setdefault(json.dumps([cell.model, cell.task], sort_keys=True), []).append(cell)
        self._tasks = [(measure(same[0]), _in_turn(same)) for same in tasks.values()]
        self.measures = tuple(sorted({kind for kind, _ in self._tasks}))
        self.batches = sum(len(places) for _, places in self._tasks)

    def added(self, look: int) -> list[Place]:
        """What is spent before look 1 … looks, besides what came before."""
        part = lambda places: slice(self._reach(places, look - 1), self._reach(places, look))
        return [place for _, places in self._tasks for place in places[part(places)]]

    def share(self, look: int, kind: str) -> float:
        """Share of the batches of one measure that have been spent by a look."""
        own = [places for other, places in self._tasks if other == kind]
        return sum(self._reach(places, look) for places in own) / sum(map(len, own))

    def _reach(self, places: list[Place], look: int) -> int:
        return math.ceil(len(places) * look / self.looks)

    def shares(self, kind: str) -> list[float]:
        """Those after which there is something new, rising up to 1."""
        return sorted({self.share(look, kind) for look in range(1, self.looks + 1)})


def _in_turn(cells: list[config.Cell]) -> list[Place]:
    count = cells[0].make_task().count()
    return [(cell.group, index) for index in range(count) for cell in cells]
