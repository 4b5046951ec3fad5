"""A [claim] table, strictly; refused before anything runs."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvlab.claims.base import Test
from kvlab.claims.column import Column
from kvlab.claims.interaction import Interaction
from kvlab.claims.locality import Locality
from kvlab.claims.memory import Memory
from kvlab.claims.miss_rates import MissRates
from kvlab.claims.padding import Padding
from kvlab.claims.pair import Pair
from kvlab.claims.product_time import ProductTime
from kvlab.claims.read_time import ReadTime
from kvlab.claims.row_time import RowTime
from kvlab.claims.samples import Sample, fits
from kvlab.claims.step_time import StepTime
from kvlab.claims.trend import Trend
from kvlab.errors import ConfigError, nearest
from kvlab.experiment import config

KINDS: dict[str, type[Test]] = {
    "interaction": Interaction,
    "trend": Trend,
    "pair": Pair,
    "memory": Memory,
    "column": Column,
    "locality": Locality,
    "miss_rates": MissRates,
    "read_time": ReadTime,
    "product_time": ProductTime,
    "padding": Padding,
    "row_time": RowTime,
    "step_time": StepTime,
}
ACTS = ("holds", "fails", "underpowered")


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `kvlab.claims`."""

    statement: str
    source: str
    holds_if: str
    test: list[dict[str, Any]]
    act: dict[str, str]
    rule: Literal["all", "any"] = "all"

    def __post_init__(self):
        if set(self.act) != set(ACTS):
            raise ConfigError(f"claim.act: {sorted(self.act)}; write what to do for each of {', '.join(ACTS)}")
        if not any(test.decides for test in self.tests):
            raise ConfigError("claim: no test decides; leave out decides = false for at least one")

    @property
    def tests(self) -> list[Test]:
        return [_test(table) for table in self.test]


def read(name: str, experiment: config.Experiment) -> Claim:
    """The claim of a file. Errors: ConfigError."""
    if experiment.claim is None:
        raise ConfigError(f"{name}: no [claim] table; see experiments/claims for some, or use kvlab run")
    return config.convert(experiment.claim, Claim, "claim")


def _test(table: dict[str, Any]) -> Test:
    kind = table.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"claim.test: kind = {kind!r}; {nearest(str(kind), KINDS)}")
    rest = {key: value for key, value in table.items() if key != "kind"}
    return config.convert(rest, KINDS[kind], f"claim.test ({kind})")


def complete(claim: Claim, cells: Sequence[config.Cell]) -> None:
    """Errors: ConfigError for a test whose policies, or whose samples, no cell gives."""
    known = {cell.label for cell in cells}
    for test in claim.tests:
        for label in test.labels:
            if label not in known:
                raise ConfigError(f"claim.test {test.name!r}: no policy {label!r}; {nearest(label, known)}")
            own = [cell for cell in cells if cell.label == label]
            if not any(fits(Sample({}, cell.task["name"], cell.make_task(), None), test.where) for cell in own):
                raise ConfigError(f"claim.test {test.name!r}: {label!r} has no task where {test.where}")
