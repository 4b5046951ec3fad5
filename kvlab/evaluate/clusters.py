"""Items summed by cluster.

The cluster, not the item, is what was sampled: variance is taken between clusters, quantiles are Student's with clusters − 1
degrees of freedom (Cameron & Miller, 2015, https://doi.org/10.3368/jhr.50.2.317).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from kvlab.errors import KvlabError


class Grouped(NamedTuple):
    """Items summed by cluster: `totals [K]`, `sizes [K]`."""

    items: np.ndarray
    totals: np.ndarray
    sizes: np.ndarray
    clustered: bool

    @property
    def mean(self) -> float:
        return float(self.items.mean())

    def variance(self) -> float:
        """Variance of the mean: K/(K−1) Σ_k (total_k − size_k · mean)² / n² (a ratio estimator; Cochran, 1977, chapter 6)."""
        k = len(self.totals)
        return (
            float(((self.totals - self.sizes * self.mean) ** 2).sum() * k / (k - 1) / len(self.items) ** 2) if k > 1 else math.inf
        )

    def quantile(self, level: float) -> float:
        """Student's with K − 1 degrees of freedom, the normal one where items are independent."""
        return student(level, len(self.totals) if self.clustered else math.inf)


def student(level: float, clusters: float) -> float:
    """Quantile with clusters − 1 degrees of freedom; infinitely many give the normal one."""
    return float(special.stdtrit(clusters - 1, level) if math.isfinite(clusters) else special.ndtri(level))


def group(values, clusters: Sequence[Any] | np.ndarray | None = None) -> Grouped:
    items = np.asarray(values, np.float64)
    if items.ndim != 1 or not len(items):
        raise KvlabError(f"statistics: values of shape {items.shape}; give a flat list of at least one item")
    if not np.isfinite(items).all():
        raise KvlabError(
            f"statistics: {int((~np.isfinite(items)).sum())} of {len(items)} values are not finite; drop or mend them"
        )
    if clusters is None:
        return Grouped(items, items, np.ones(len(items)), False)
    if len(clusters) != len(items):
        raise KvlabError(f"statistics: {len(items)} values but {len(clusters)} cluster names; give one for each")
    if isinstance(clusters, np.ndarray):
        index = np.unique(clusters, return_inverse=True)[1]
    else:  # any names that can be hashed, tuples too
        number: dict[Any, int] = {}
        index = np.array([number.setdefault(c, len(number)) for c in clusters])
    return Grouped(items, np.bincount(index, items), np.bincount(index).astype(float), True)


def paired(policy, reference) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(policy, np.float64), np.asarray(reference, np.float64)
    if a.shape != b.shape:
        raise KvlabError(f"statistics: {a.shape} values against {b.shape}; pair them: the same items in the same order")
    return a, b


def check_alpha(alpha: float) -> None:
    if not 0 < alpha < 0.5:
        raise KvlabError(f"alpha = {alpha}; allowed: 0 < alpha < 0.5, such as 0.05")
