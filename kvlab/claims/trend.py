"""Does a loss grow with something: the length, how far back an answer lies, how many others compete with it?"""

from typing import Literal

import numpy as np

from kvlab.claims import base, samples
from kvlab.claims.base import Finding
from kvlab.claims.samples import Table
from kvlab.errors import ConfigError

LEVELS = 8  # of the covariate that the picture tells apart


class Trend(base.Test, frozen=True, kw_only=True):
    """The slope of `policy` − `reference` over a covariate, on the same samples.

    Attributes:
      covariate: a column of the samples (depth) or a field of their task (length); a list of them is summed.
      scale: "log2" for a slope per doubling, "linear" for one per unit.
      direction: whether the loss is said to rise or to fall with the covariate.
      relative: the slope over the mean loss, so that `more_than = 0.1` is a tenth of it per doubling or unit.
    """

    policy: str
    covariate: str | list[str]
    measure: str = "nll"
    reference: str = "full"
    scale: Literal["log2", "linear"] = "log2"
    direction: Literal["rises", "falls"] = "rises"
    relative: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        return self.policy, self.reference

    def find(self, table: Table, alpha: float) -> Finding:
        pairs = samples.paired(table, self.labels, self.measure, self.where)
        loss = pairs.values[:, 0] - pairs.values[:, 1]
        names = [self.covariate] if isinstance(self.covariate, str) else self.covariate
        along = np.array([samples.covariate(sample, names) for sample in pairs.samples])
        if self.scale == "log2" and along.min() <= 0:
            raise ConfigError(f'{self.name}: {" + ".join(names)} reaches {along.min():g}; write scale = "linear"')
        sign = 1 if self.direction == "rises" else -1
        x = sign * (np.log2(along) if self.scale == "log2" else along)
        estimate = samples.slope(x, loss, pairs.clusters, self.measure, alpha, self.relative)
        unit = "of the mean" if self.relative else samples.unit(self.measure)
        series = self._levels(along, loss, pairs.clusters, alpha)
        step = "a doubling" if self.scale == "log2" else "for the whole" if names == ["depth"] else "for one more"
        per = f"{step} of {' + '.join(names)}"
        fall = "" if sign > 0 else " less"
        at = ", ".join(f"{samples.show(v, samples.unit(self.measure))} at {x:.4g}" for x, v in zip(series["x"], series["value"]))
        text = f"{samples.interval(estimate, unit)}{fall} {per}; losses {at}"
        return base.finding(self, "trend", estimate, alpha, unit, text, **series)

    def _levels(self, along, loss, clusters, alpha: float) -> dict[str, list[float]]:
        """Mean losses with intervals: at every value of the covariate, or where these are many, in equal parts of the samples."""
        if len(np.unique(along)) <= LEVELS:
            level = np.unique(along, return_inverse=True)[1]
        else:
            level = np.minimum(np.argsort(np.argsort(along, kind="stable"), kind="stable") * 4 // len(along), 3)
        made: dict[str, list[float]] = {name: [] for name in ("x", "value", "low", "high")}
        for i in np.unique(level):
            inside = np.flatnonzero(level == i)
            estimate = samples.mean(loss[inside], [clusters[j] for j in inside], self.measure, alpha)
            made["x"].append(float(along[inside].mean()))
            made["value"].append(float(loss[inside].mean()))
            made["low"].append(estimate.low)
            made["high"].append(estimate.high)
        return made

    def draw(self, axis, found: Finding) -> None:
        unit = samples.unit(self.measure)
        factor = 100 if unit == "points" else 1
        x, value, low, high = (np.array(found.series[name]) for name in ("x", "value", "low", "high"))
        ends = base.whiskers(value, low, high, factor)
        axis.errorbar(x, factor * value, ends, fmt="o-", color="tab:blue", ecolor="0.5", capsize=3)
        if self.scale == "log2":
            axis.set_xscale("log", base=2)
            axis.set_xticks(x, [f"{level:,.4g}" for level in x])
        axis.axhline(0, color="0.8", lw=1)
        names = [self.covariate] if isinstance(self.covariate, str) else self.covariate
        axis.set_xlabel(" + ".join(names))
        axis.set_ylabel(f"loss against {self.reference}, {unit or self.measure}")
