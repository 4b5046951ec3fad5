"""A figure besides quality between two policies, such as the entropy of attention, layer by layer."""

from typing import Literal

import numpy as np

from kvlab.claims import base, samples
from kvlab.claims.base import FAILS, HOLDS, Finding
from kvlab.claims.samples import Table
from kvlab.errors import ResultsError


class Column(base.Test, frozen=True, kw_only=True):
    """How much a column rises or falls from `reference` to `policy` on the same samples.

    Attributes:
      column: "entropy" (of the attention of decode steps, nats, mean over layers, heads and the steps kept), or a column of
        the samples such as read_ratio.
      layers: the first and last layer to count, for the entropy; all without.
      direction: whether it is said to rise or to fall.
    """

    policy: str
    reference: str = "full"
    column: str = "entropy"
    layers: tuple[int, int] | None = None
    direction: Literal["rises", "falls"] = "falls"

    @property
    def labels(self) -> tuple[str, ...]:
        return self.policy, self.reference

    def find(self, table: Table, alpha: float) -> Finding:
        change, mean, clusters = self._changes(table)
        sign = 1 if self.direction == "rises" else -1
        estimate = samples.mean(sign * change.mean(1), clusters, self.column, alpha)
        unit = samples.unit(self.column)
        verb = "rises" if sign > 0 else "falls"
        text = f"from {mean:.3f} it {verb} by {samples.interval(estimate, unit)}"
        series: dict[str, list] = {}
        if change.shape[1] > 1:
            # each layer's interval at its share of alpha, so that those named are right together
            each = [samples.mean(sign * column, clusters, self.column, alpha / change.shape[1]) for column in change.T]
            series = {"layer": list(range(self._first, self._first + len(each)))}
            series |= {name: [getattr(e, name) for e in each] for name in ("value", "low", "high")}
            text += "; " + self._by_layer([base.decide(e, 0.0) for e in each], int(np.argmax(series["value"])))
        return base.finding(self, "column", estimate, alpha, unit, text, **series)

    @property
    def _first(self) -> int:
        return self.layers[0] if self.layers else 0

    def _changes(self, table: Table) -> tuple[np.ndarray, float, list]:
        """policy − reference `[n, L]` (L = 1 for scalars), the reference's mean, and clusters."""
        if self.column != "entropy":
            pairs = samples.paired(table, self.labels, self.column, self.where)
            return pairs.values[:, :1] - pairs.values[:, 1:], float(pairs.values[:, 1].mean()), pairs.clusters
        mine, theirs = (table[label] for label in self.labels)
        keys = [key for key, sample in mine.items() if key in theirs and samples.fits(sample, self.where)]
        if not keys:
            raise ResultsError(
                f"{self.name}: no sample of both {self.policy!r} and {self.reference!r} where {self.where or 'anything'}"
            )
        span = slice(*((self.layers[0], self.layers[1] + 1) if self.layers else (None, None)))
        one, other = (np.array([own[key].row["entropy_by_layer"] for key in keys])[:, span] for own in (mine, theirs))
        return one - other, float(other.mean()), [mine[key].cluster for key in keys]

    def _by_layer(self, outcomes: list[str], most: int) -> str:
        verb, other = ("rises", "falls") if self.direction == "rises" else ("falls", "rises")
        up, down = outcomes.count(HOLDS), outcomes.count(FAILS)
        opposite = [str(self._first + i) for i, outcome in enumerate(outcomes) if outcome == FAILS]
        named = f" ({', '.join(opposite)})" if opposite else ""
        rest = len(outcomes) - up - down
        return (
            f"it {verb} in {up} of {len(outcomes)} layers, most in {self._first + most}, {other} in {down}{named}, open in {rest}"
        )

    def draw(self, axis, found: Finding) -> None:
        series, sign = found.series, 1 if self.direction == "rises" else -1
        if not series:
            series = {"layer": [0], "value": [found.value], "low": [found.low], "high": [found.high]}
        value, low, high = (sign * np.array(series[name]) for name in ("value", "low", "high"))
        ends = base.whiskers(value, np.minimum(low, high), np.maximum(low, high))
        axis.errorbar(series["layer"], value, ends, fmt="o", color="tab:blue", ecolor="0.5", ms=4)
        axis.axhline(0, color="0.8", lw=1)
        axis.axhline(sign * found.more_than, color="tab:red", lw=1, label="what the mean should pass")
        axis.set_xlabel("layer")
        axis.set_ylabel(f"{self.column}, {self.policy} − {self.reference}")
        axis.legend(frameon=False, fontsize="small")
