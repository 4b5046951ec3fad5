"""Two changes and both together: is the loss of both more than the losses of each?"""

from typing import Any

import numpy as np

from kvlab.claims import base, samples
from kvlab.claims.base import Finding
from kvlab.claims.samples import Table
from kvlab.evaluate.statistics import Estimate


class Interaction(base.Test, frozen=True, kw_only=True):
    """A 2×2 of policies on the same samples: nothing changed, `a`, `b`, `both`; ℓ is a policy's loss against `full`.

    Without a `ratio` the quantity is d = (both − a) − (b − full), what both lose beyond the sum of a's and b's loss.
    With one, the claim is that both lose more than `ratio` times what either does: ℓ_both − ratio · ℓ_a and
    ℓ_both − ratio · ℓ_b, both larger than `more_than`; the smaller decides, and its interval holds both: from the lower of
    the low ends to the lower of the high ones. Such differences are compared instead of a quotient, since the loss below the
    line may be near zero (Fieller, 1954).
    """

    a: str
    b: str
    both: str
    full: str = "full"
    measure: str = "nll"
    ratio: float | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return self.full, self.a, self.b, self.both

    @property
    def bounds(self) -> int:
        return 1 if self.ratio is None else 2

    def find(self, table: Table, alpha: float) -> Finding:
        pairs = samples.paired(table, self.labels, self.measure, self.where)
        loss = pairs.values[:, 1:] - pairs.values[:, :1]  # of a, b and both
        unit = samples.unit(self.measure)
        estimate = lambda values: samples.mean(values, pairs.clusters, self.measure, alpha)
        if self.ratio is None:
            quantity = estimate(loss[:, 2] - loss[:, 0] - loss[:, 1])
        else:
            quantity = _smaller(*(estimate(loss[:, 2] - self.ratio * loss[:, i]) for i in (0, 1)))
        means = [estimate(loss[:, i]) for i in range(3)]
        text = self._text(loss, samples.interval(quantity, unit), unit)
        series = {
            "labels": [self.a, self.b, self.both],
            **{name: [getattr(e, name) for e in means] for name in ("value", "low", "high")},
        }
        return base.finding(self, "interaction", quantity, alpha, unit, text, **series)

    def _text(self, loss: np.ndarray, quantity: str, unit: str) -> str:
        a, b, both = loss.mean(0)
        alone = f"alone {samples.show(a, unit)} and {samples.show(b, unit)}, together {samples.show(both, unit)}"
        larger = max(a, b)
        times = f" ({both / larger:.2f} times the larger)" if larger > 0 else ""
        against = "beyond their sum" if self.ratio is None else f"beyond {self.ratio:g} times the larger"
        return f"{alone}{times}: {against} {quantity}"

    def draw(self, axis, found: Finding) -> None:
        series: dict[str, Any] = found.series
        factor = 100 if found.unit == "points" else 1
        value = factor * np.array(series["value"])
        axis.bar(range(3), value, color=["0.7", "0.7", "tab:blue"], width=0.6)
        ends = base.whiskers(series["value"], series["low"], series["high"], factor)
        axis.errorbar(range(3), value, ends, fmt="none", color="0.3", capsize=3)
        wanted = value[0] + value[1] if self.ratio is None else self.ratio * max(value[0], value[1])
        axis.hlines(wanted, 1.6, 2.4, color="tab:red", label="their sum" if self.ratio is None else f"{self.ratio:g} times")
        axis.set_xticks(range(3), series["labels"], fontsize="small")
        axis.set_ylabel(f"loss against full, {found.unit}")
        axis.legend(frameon=False, fontsize="small")


def _smaller(one: Estimate, other: Estimate) -> Estimate:
    """Of two quantities with intervals that are right together: what they say of the smaller, whichever that is in truth."""
    least = min(one, other, key=lambda each: each.value)
    return least._replace(low=min(one.low, other.low), high=min(one.high, other.high))
