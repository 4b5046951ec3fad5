"""Is a policy no worse than the full cache by a margin fixed in advance? Pass, fail, or underpowered.

    pass           the bound excludes a loss of the margin or more          (non-inferior, one-sided alpha)
    fail           the interval excludes every loss smaller than the margin (worse by more than the margin, one-sided alpha)
    underpowered   neither: this many items cannot tell

Non-inferiority by a confidence interval as in Piaggio et al. (2012, https://doi.org/10.1001/jama.2012.87802, figure 1).
A difference that is not significant is no pass. Each verdict has its own alpha; nothing is corrected for asking of several
policies (`statistics.holm` does that for p values).
"""

import dataclasses
import math

from kvlab.errors import KvlabError
from kvlab.evaluate import sample_size, statistics
from kvlab.evaluate.clusters import student
from kvlab.evaluate.statistics import Estimate


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verdict and what it rests on.

    Attributes:
      outcome: "pass", "fail" or "underpowered".
      difference, low, high: policy − reference and its interval at 1 − 2·alpha, in the items' unit.
      margin: the loss that would matter, > 0, same unit.
      items, clusters: what was compared.
      minimum_detectable_effect: the smallest margin that this much data settles with power 0.8 if nothing changed (and the
        loss beyond the margin that it shows); same unit.
      items_needed, clusters_needed: to settle this margin with power 0.8 if nothing changed, the items being as variable and
        as clustered as these; more than there are where these do not settle it; infinite if unknown.
      reason: why, in words, where the numbers alone do not say it.
    """

    outcome: str
    difference: float
    low: float
    high: float
    margin: float
    alpha: float
    items: int
    clusters: int
    minimum_detectable_effect: float
    items_needed: float
    clusters_needed: float
    reason: str = ""


def binary(policy, reference, margin: float, clusters=None, alpha: float = 0.05) -> Verdict:
    """Of items that are right (1) or wrong (0); the margin is a share, 0.01 is one point."""
    return decide(statistics.binary_difference(policy, reference, clusters, alpha), margin, alpha, worse="lower")


def continuous(
    policy, reference, margin: float, clusters=None, alpha: float = 0.05, worse: str = "higher", seed: int = 0
) -> Verdict:
    """Of values such as nats a token, where `worse` says which way a loss goes; the margin is in their unit."""
    return decide(statistics.mean_difference(policy, reference, clusters, alpha, seed), margin, alpha, worse)


def decide(estimate: Estimate, margin: float, alpha: float = 0.05, worse: str = "lower") -> Verdict:
    """A verdict on an interval at 1 − 2·alpha. Errors: KvlabError for a margin that is not positive."""
    if not margin > 0 or worse not in ("lower", "higher"):
        raise KvlabError(f"margin = {margin}, worse = {worse!r}; give a loss > 0, and lower or higher")
    value, low, high, items, clusters = estimate[:5]
    most, least = (-low, -high) if worse == "lower" else (high, low)  # the loss is between least and most
    loss = -value if worse == "lower" else value
    degrees = clusters if estimate.clustered else math.inf
    error = math.inf
    if degrees > 1:
        error = sample_size.median_unbiased((most - loss) / student(1 - alpha, degrees), degrees)
    outcome = "pass" if most < margin else "fail" if least > margin else "underpowered"
    needed = items_needed(estimate, margin, alpha)
    if outcome == "underpowered" and needed <= items:  # planned from too few events: their bound falls with 1/n
        needed = math.ceil(items * most / margin)
    return Verdict(
        outcome,
        value, low, high, margin, alpha, items, clusters,
        sample_size.minimum_detectable(error, degrees, alpha),
        needed,
        math.ceil(needed * clusters / items) if math.isfinite(needed) else math.inf,
        _reason(clusters, low == high),
    )  # fmt: skip


def items_needed(estimate: Estimate, margin: float, alpha: float) -> float:
    """n = units_needed(variance · (n + doubt[1]) / (n + doubt[0])), solved for n; two clusters more where t is Student's."""
    n = sample_size.units_needed(estimate.variance, margin, alpha)
    if not math.isfinite(n) or n == 0:
        return n
    known, doubted = estimate.doubt
    n = (n - known + math.sqrt((n - known) ** 2 + 4 * n * doubted)) / 2
    return math.ceil(n + 2 * estimate.items / estimate.clusters * estimate.clustered)


def _reason(clusters: int, flat: bool) -> str:
    if clusters < 2:
        return f"{clusters} cluster: how clusters differ cannot be seen"
    return "every cluster gave the same difference" if flat else ""
