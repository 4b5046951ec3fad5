"""How a value grows with a covariate, where items come in clusters."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import special

from kvlab.errors import KvlabError
from kvlab.evaluate.clusters import check_alpha, group, paired, student
from kvlab.evaluate.statistics import BOOTSTRAP_FROM, RESAMPLES, Estimate


def slope(
    x: Sequence[float], y: Sequence[float], clusters: Sequence[Any], alpha: float = 0.05, relative: bool = False, seed: int = 0
) -> Estimate:
    """The least-squares slope of y over x, in y's unit for each of x's, with an interval at level 1 − 2·alpha over clusters.

        b = Σ (x − x̄)(y − ȳ) / Σ (x − x̄)²

    Up to 29 clusters by the jackknife over clusters and Student's t, from 30 on a percentile bootstrap over clusters, as
    `statistics.mean_difference` (Davison & Hinkley, 1997, chapters 2.7 and 6.2.4). A cluster may hold several x or one.

    Args:
      relative: the slope over the mean of y, so that 0.5 is growth by half of the mean.
    Errors: KvlabError for an x that is the same everywhere, and for input as in `kvlab.evaluate.statistics`.
    """
    check_alpha(alpha)
    x_, y_ = paired(x, y)
    if not np.ptp(x_) > 0:
        raise KvlabError("trend: the covariate is the same for every item; compare samples in which it differs")
    columns = [np.ones_like(x_), x_, y_, x_ * x_, x_ * y_]
    sums = np.stack([group(column, clusters).totals for column in columns], -1)  # [K, 5]
    of = lambda total: _slope(total, relative)
    value, count = float(of(sums.sum(0))), len(sums)
    if count < 2:
        return Estimate(value, -math.inf, math.inf, len(x_), count, True, math.inf)
    without = of(sums.sum(0) - sums)
    variance = float(((without - without.mean()) ** 2).sum() * (count - 1) / count)
    low, high = _ends(sums, of, value, variance, alpha, seed)
    return Estimate(value, low, high, len(x_), count, True, variance * len(x_) if math.isfinite(variance) else math.inf)


def _slope(total, relative: bool):
    """From sums of 1, x, y, x² and xy, `[..., 5]`; not a number where x does not vary."""
    n, x, y, xx, xy = np.moveaxis(total, -1, 0)
    spread = xx - x * x / np.maximum(n, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        made = (xy - x * y / n) / np.where(spread > 1e-9 * np.maximum(xx, 1e-300), spread, np.nan)
        return made / (y / n) if relative else made


def _ends(sums, of: Callable, value: float, variance: float, alpha: float, seed: int) -> tuple[float, float]:
    count = len(sums)
    if not math.isfinite(variance):  # x does not vary without some cluster
        return -math.inf, math.inf
    if count < BOOTSTRAP_FROM:
        half = student(1 - alpha, count) * math.sqrt(variance)
        return value - half, value + half
    level = float(special.ndtr(-math.sqrt(count / (count - 1)) * student(1 - alpha, count)))
    chosen = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.nanquantile(of(sums[chosen].sum(1)), [level, 1 - level])
    return float(low), float(high)
