"""What every kind of test shares: its options, its finding, and the rule from an interval to an outcome."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from scipy import special

from kvlab.claims.samples import Table
from kvlab.evaluate.clusters import student
from kvlab.evaluate.sample_size import POWER
from kvlab.evaluate.statistics import Estimate

HOLDS, FAILS, OPEN = "holds", "does not hold", "underpowered"


class Test(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A test of a claim.

    Attributes:
      name: what it compares, in a few words.
      decides: whether the verdict rests on it; others are shown beside.
      where: fields of the task that samples must have, such as {name = "needle", length = 2048}; all samples without.
      more_than: the quantity that would settle the claim, in the measure's unit.
    """

    __test__ = False  # pytest would take it for tests

    name: str
    decides: bool = True
    where: dict[str, Any] = {}
    more_than: float = 0.0

    @property
    def labels(self) -> tuple[str, ...]:
        """The policies that it compares, by label; none where no model runs."""
        return ()

    @property
    def bounds(self) -> int:
        """How many intervals it rests on; none where it is arithmetic."""
        return 1

    def find(self, table: Table, alpha: float) -> "Finding":
        raise NotImplementedError

    def draw(self, axis, found: "Finding") -> None:
        """Into one panel of the picture, from the finding alone."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came out of one test.

    Attributes:
      outcome: "holds", "does not hold" or "underpowered".
      text: a sentence with the figures in it.
      value, low, high, more_than: the quantity, its interval at 1 − 2·alpha and what it was to be larger than; in `unit`.
      items, clusters: samples, and contexts or documents that they come from.
      clusters_needed: to settle it with power 0.8 if the truth is `value`; infinite where that is `more_than`.
      series: what the picture shows, lists by name.
      table: figures that are too many for a sentence, rows of texts by column.
    """

    kind: str
    name: str
    decides: bool
    outcome: str
    text: str
    value: float
    low: float
    high: float
    more_than: float
    unit: str
    items: int = 0
    clusters: int = 0
    clusters_needed: float = math.inf
    series: dict[str, Any] = dataclasses.field(default_factory=dict)
    table: list[dict[str, str]] = dataclasses.field(default_factory=list)


def whiskers(value, low, high, factor: float = 1.0):
    """Lengths `[2, n]` for a picture's intervals, 0 where an end is infinite."""
    ends = factor * np.array([np.subtract(value, low, dtype=float), np.subtract(high, value, dtype=float)])
    return np.maximum(np.where(np.isfinite(ends), ends, 0.0), 0.0).reshape(2, -1)


def decide(estimate: Estimate, more_than: float) -> str:
    """Of the claim that a quantity is larger than `more_than`."""
    if estimate.low > more_than:
        return HOLDS
    return FAILS if estimate.high < more_than else OPEN


def needed(estimate: Estimate, more_than: float, alpha: float) -> float:
    """Clusters K · ((z_1−α + z_power) · error / |value − more_than|)², were the value the truth; infinite if unknown."""
    distance = abs(estimate.value - more_than)
    if estimate.clusters < 2 or not math.isfinite(estimate.high - estimate.low) or distance == 0:
        return math.inf
    error = (estimate.high - estimate.low) / 2 / student(1 - alpha, estimate.clusters)
    factor = float(special.ndtri(1 - alpha) + special.ndtri(POWER))
    return math.ceil(max(estimate.clusters * (factor * error / distance) ** 2, 2))


def outcome(findings: Iterable[Finding], rule: str) -> str:
    """Of all that decide: with "all", what any of them refutes does not hold; with "any", what any of them shows holds."""
    found = {each.outcome for each in findings if each.decides}
    order = (FAILS, OPEN, HOLDS) if rule == "all" else (HOLDS, OPEN, FAILS)
    return next(each for each in order if each in found)


def share(alpha: float, tests: Iterable[Test]) -> float:
    """Alpha shared among the intervals that decide (Bonferroni), so that they are right together."""
    return alpha / max(sum(test.bounds for test in tests if test.decides), 1)


def level(alpha: float, samples: bool, kinds: Iterable[str]) -> str:
    """What the intervals of a claim are, in words; nothing where it has none."""
    if not samples and "timed" not in kinds:
        return ""
    return f"[low, high]: intervals of {1 - 2 * alpha:.1%}, by {'context or document' if samples else 'round'}."


def finding(test: Test, kind: str, estimate: Estimate, alpha: float, unit: str, text: str, **series) -> Finding:
    """A finding on a quantity with its interval, the text completed by what is missing."""
    result, more = decide(estimate, test.more_than), needed(estimate, test.more_than, alpha)
    if result == OPEN:
        text += f"; {estimate.clusters:,} texts leave it open"
        text += f", {more:,.0f} would settle it if this is the truth" if math.isfinite(more) else ", and more may not settle it"
    return Finding(
        kind, test.name, test.decides, result, text, estimate.value, estimate.low, estimate.high, test.more_than, unit,
        estimate.items, estimate.clusters, more, series,
    )  # fmt: skip
