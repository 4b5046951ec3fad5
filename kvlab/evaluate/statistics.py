"""Intervals and tests for paired comparisons whose items come in clusters: needles of a context, tokens of a document.

`alpha` is one-sided throughout: every interval is two-sided at level 1 − 2·alpha, and each end is a bound at level 1 − alpha.
`clusters` names the cluster of each item; None means that items are independent. Errors: KvlabError for input that is empty,
not finite or of different lengths.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

from kvlab.errors import KvlabError
from kvlab.evaluate.clusters import Grouped, check_alpha, group, paired, student

BOOTSTRAP_FROM = 30  # clusters; with fewer a percentile bootstrap is too narrow
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean with its interval, in the unit of the items.

    `variance` is one item's share of the mean's variance, `variance / items`, clustering included. `doubt` is what the
    uncertainty about clustering adds with few items: with n of them variance is taken (n + doubt[1]) / (n + doubt[0]) times.
    """

    value: float
    low: float
    high: float
    items: int
    clusters: int
    clustered: bool
    variance: float
    doubt: tuple[float, float] = (0.0, 0.0)


# ------------------------------------------------------------------------------------------------------ binary items


def design_effect(grouped: Grouped, events: int) -> tuple[float, float]:
    """(as estimated, as used for intervals): how many clustered items are worth one independent item, at least 1.

    Estimated is variance between clusters over variance of independent items (Korn & Graubard, 1998, Survey Methodology 24).
    With few events (discordant pairs, say) little is known about clustering, so the used figure weighs in one event more, which
    struck a whole cluster: (e · estimated + mean size) / (e + 1) with e = events / estimated. Without events clusters count.
    """
    n, size = len(grouped.items), float(grouped.sizes.mean())
    independent = grouped.items.var(ddof=1) / n if n > 1 else 0.0
    estimated = max(1.0, grouped.variance() / independent) if independent > 0 and len(grouped.totals) > 1 else 1.0
    independent_events = events / estimated
    return estimated, max(estimated, (events + size) / (independent_events + 1))


def tango(gains: float, losses: float, n: float, quantile: float) -> tuple[float, float]:
    """Score interval for a paired difference of proportions; never of zero width. Counts may be fractions.

    The ends are the Δ with |gains − losses − nΔ| = quantile · √(n (2q + Δ(1 − Δ))), q the likeliest rate of losses given Δ
    (Tango, 1998, https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B).
    """
    difference = (gains - losses) / n

    def beyond(delta: float) -> float:
        b = (2 * n + losses - gains) * delta - gains - losses
        c = -losses * delta * (1 - delta)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        return n * (difference - delta) ** 2 - quantile**2 * max(2 * q + delta * (1 - delta), 0.0)

    def end(limit: float) -> float:
        start = difference + math.copysign(1e-12, limit)  # without discordant pairs the difference itself is a root
        return limit if abs(start) >= 1 or beyond(limit) <= 0 else float(optimize.brentq(beyond, start, limit))

    return end(-1.0), end(1.0)


def binary_difference(policy, reference, clusters=None, alpha: float = 0.05) -> Estimate:
    """Policy − reference of the share correct, on the same items: Tango's interval on the effective number of items.

    Units: shares (0.01 is one point). One cluster says nothing: its interval is [−1, 1].
    """
    check_alpha(alpha)
    a, b = paired(policy, reference)
    if not np.isin(np.concatenate([a, b]), (0, 1)).all():
        raise KvlabError("statistics: binary items must be 0 or 1; use mean_difference for other values")
    grouped = group(a - b, clusters)
    n, k = len(a), len(grouped.totals)
    gains, losses = int((a > b).sum()), int((a < b).sum())
    estimated, used = design_effect(grouped, gains + losses)
    if grouped.clustered and k < 2:
        return Estimate(grouped.mean, -1.0, 1.0, n, k, True, math.inf)
    low, high = tango(gains / used, losses / used, n / used, grouped.quantile(1 - alpha))
    discordance = (gains + losses + 0.5) / (n + 1)  # half an event more, so that none seen does not plan for none
    doubt = estimated / discordance, n / k / discordance
    return Estimate(grouped.mean, low, high, n, k, grouped.clustered, discordance * estimated, doubt)


def proportion(correct, clusters=None, alpha: float = 0.05) -> Estimate:
    """A share with Wilson's interval, on the effective number of items where they are clustered.

    (p + t²/2n ± t √(p(1 − p)/n + t²/4n²)) / (1 + t²/n)  (Wilson, 1927); t normal, or Student's with clusters − 1.
    """
    check_alpha(alpha)
    grouped = group(correct, clusters)
    count, k, p = len(grouped.items), len(grouped.totals), grouped.mean
    estimated, used = design_effect(grouped, int(min(grouped.items.sum(), count - grouped.items.sum())))
    if grouped.clustered and k < 2:
        return Estimate(p, 0.0, 1.0, count, k, True, math.inf)
    n, t = count / used, grouped.quantile(1 - alpha)
    middle, half = p + t * t / (2 * n), t * math.sqrt(p * (1 - p) / n + t * t / (4 * n * n))
    low, high = ((middle + sign * half) / (1 + t * t / n) for sign in (-1, 1))
    return Estimate(p, max(low, 0.0), min(high, 1.0), count, k, grouped.clustered, p * (1 - p) * estimated)


def mcnemar(policy, reference, alternative: str = "two-sided") -> float:
    """Exact p of McNemar's test: of the discordant pairs, gains are binomial with 1/2 if nothing changed; 1 if there are none.

    `alternative="less"` asks whether the policy is worse. It takes items as independent and tests for no difference at all.
    """
    a, b = paired(policy, reference)
    grouped = group(a - b)
    gains, losses = int((grouped.items > 0).sum()), int((grouped.items < 0).sum())
    return float(stats.binomtest(gains, gains + losses, 0.5, alternative).pvalue) if gains + losses else 1.0


# ----------------------------------------------------------------------------------------------------- other values


def mean_difference(policy, reference, clusters=None, alpha: float = 0.05, seed: int = 0) -> Estimate:
    """Policy − reference of any value (nats a token, say), averaged over items.

    Up to 29 clusters mean ± t √variance; from 30 on a percentile bootstrap over clusters, which follows skew. Fewer than two
    clusters give an infinite interval; equal values everywhere give one of no width.
    """
    check_alpha(alpha)
    a, b = paired(policy, reference)
    grouped = group(a - b, clusters)
    n, k, variance = len(a), len(grouped.totals), grouped.variance()
    if k < 2:
        return Estimate(grouped.mean, -math.inf, math.inf, n, k, grouped.clustered, math.inf)
    if k < BOOTSTRAP_FROM:
        half = student(1 - alpha, k) * math.sqrt(variance)
        low, high = grouped.mean - half, grouped.mean + half
    else:
        low, high = bootstrap(grouped, alpha, seed)
    return Estimate(grouped.mean, low, high, n, k, grouped.clustered, variance * n)


def mean(values, clusters=None, alpha: float = 0.05, seed: int = 0) -> Estimate:
    """As `mean_difference`, of one list of values."""
    return mean_difference(values, np.zeros(np.shape(values)), clusters, alpha, seed)


def unskewed(policy, reference, clusters=None, alpha: float = 0.05) -> Estimate:
    """As `mean_difference`, for levels too small to be seen in resamples: Student's bounds, with skew between clusters taken off.

    (estimate − mean) / error is t, with t + g (2 t² + 1) / 6 + g² t³ / 27 Student's, g = skewness / √K
    (Hall, 1992, J. R. Statist. Soc. B 54, 221–228). Without that, losses that few documents carry pass twice as often as alpha.
    """
    check_alpha(alpha)
    a, b = paired(policy, reference)
    grouped = group(a - b, clusters)
    n, k, variance = len(a), len(grouped.totals), grouped.variance()
    if k < 2:
        return Estimate(grouped.mean, -math.inf, math.inf, n, k, grouped.clustered, math.inf)
    apart, error, quantile = grouped.totals - grouped.sizes * grouped.mean, math.sqrt(variance), student(1 - alpha, k)
    spread = math.sqrt((apart**2).mean())
    g = float(((apart / spread) ** 3).mean()) / math.sqrt(k) if spread > 0 else 0.0
    low, high = (grouped.mean - _hall(sign * quantile, g) * error for sign in (1, -1))
    return Estimate(grouped.mean, low, high, n, k, grouped.clustered, variance * n)


def _hall(y: float, g: float) -> float:
    """The t whose transformation is y."""
    return 3 / g * (float(np.cbrt(1 + g * (y - g / 6))) - 1) if abs(g) > 1e-6 else y


def bootstrap(grouped: Grouped, alpha: float = 0.05, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile interval of the mean over resampled clusters, each with all its items (Davison & Hinkley, 1997, ch. 5.3).

    Its level is Φ(−√(K/(K−1)) t_1−α) instead of alpha, which makes up for the missing K/(K−1) and for Student's tails
    (Hesterberg, 2015, https://doi.org/10.1080/00031305.2015.1089789). Percentile rather than BCa: for a mean over
    many clusters the two agree, and BCa's acceleration is a third moment, which few clusters cannot give. With few of them
    resamples take few values, so use `mean_difference`.
    """
    k = len(grouped.totals)
    alpha = float(special.ndtr(-math.sqrt(k / (k - 1)) * student(1 - alpha, k)))
    chosen = np.random.default_rng(seed).integers(k, size=(resamples, k))
    means = grouped.totals[chosen].sum(1) / grouped.sizes[chosen].sum(1)
    low, high = np.quantile(means, [alpha, 1 - alpha])
    return float(low), float(high)


def holm(p_values) -> np.ndarray:
    """Adjusted p: the i-th smallest of m times m − i + 1, made rising, at most 1 (Holm, 1979, Scand. J. Statist. 6, 65–70)."""
    p = group(p_values).items
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted
