"""One policy against another: is it better, or at least no worse, and at how many bytes?"""

from typing import Literal

import numpy as np

from kvlab.claims import base, samples
from kvlab.claims.base import OPEN, Finding
from kvlab.claims.samples import Table
from kvlab.evaluate import statistics
from kvlab.evaluate.statistics import Estimate


class Pair(base.Test, frozen=True, kw_only=True):
    """By how much `policy` is better than `against` on the same samples, `more_than` how much.

    `more_than = 0` asks whether it is superior, a negative one whether it is no worse by that much (non-inferior).

    Attributes:
      equal: the bytes that must be alike, "read_bytes" (of a step) or "resident_bytes"; both are printed in any case.
      tolerance: share by which they may differ.
    """

    policy: str
    against: str = "full"
    measure: str = "nll"
    equal: Literal["read_bytes", "resident_bytes"] | None = None
    tolerance: float = 0.02

    @property
    def labels(self) -> tuple[str, ...]:
        return self.policy, self.against

    def find(self, table: Table, alpha: float) -> Finding:
        pairs = samples.paired(table, self.labels, self.measure, self.where)
        mine, theirs = pairs.values.T
        estimate = self._estimate(mine, theirs, pairs.clusters, alpha)
        unit = samples.unit(self.measure)
        sizes = {name: self._bytes(table, name) for name in ("read_bytes", "resident_bytes")}
        bytes_ = "; ".join(f"{name.split('_')[0]} {a / 1e6:.2f} against {b / 1e6:.2f} MB" for name, (a, b) in sizes.items())
        level = 100 * (1 - mine.mean()) if self.measure == samples.BINARY else mine.mean()
        other = 100 * (1 - theirs.mean()) if self.measure == samples.BINARY else theirs.mean()
        text = f"{self.policy} {level:.4g}, {self.against} {other:.4g}: better by {samples.interval(estimate, unit)}; {bytes_}"
        series = {"labels": list(self.labels), **{name: list(pair) for name, pair in sizes.items()}}
        made = base.finding(self, "pair", estimate, alpha, unit, text, **series)
        if self.equal and abs(np.subtract(*sizes[self.equal])) > self.tolerance * max(sizes[self.equal]):
            why = f"{made.text}; their {self.equal} differ by more than {self.tolerance:.0%}, so nothing follows"
            return Finding(**{**vars(made), "outcome": OPEN, "text": why})
        return made

    def _estimate(self, mine, theirs, clusters, alpha: float) -> Estimate:
        if self.measure == samples.BINARY:  # badness is 1 where an answer is wrong
            return statistics.binary_difference(1 - mine, 1 - theirs, clusters, alpha)
        return samples.mean(theirs - mine, clusters, self.measure, alpha)

    def _bytes(self, table: Table, column: str) -> tuple[float, float]:
        pairs = samples.paired(table, self.labels, column, self.where)
        return float(pairs.values[:, 0].mean()), float(pairs.values[:, 1].mean())

    def draw(self, axis, found: Finding) -> None:
        factor = 100 if found.unit == "points" else 1
        ends = base.whiskers(found.value, found.low, found.high, factor)
        axis.errorbar([factor * found.value], [0], xerr=ends, fmt="o", color="tab:blue", capsize=4)
        axis.axvline(factor * found.more_than, color="tab:red", label="more than this")
        axis.axvline(0, color="0.8", lw=1, zorder=0)
        axis.set_yticks([])
        axis.set_xlabel(f"{self.policy} better than {self.against} by, {found.unit or self.measure}")
        axis.legend(frameon=False, fontsize="small")
