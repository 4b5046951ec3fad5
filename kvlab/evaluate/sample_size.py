"""How much data a margin takes, and what margin some data can settle."""

import functools
import math

from scipy import optimize, special

from kvlab.errors import KvlabError
from kvlab.evaluate.clusters import check_alpha, student

POWER = 0.8


def units_needed(variance: float, margin: float, alpha: float = 0.05, power: float = POWER) -> float:
    """Units with which non-inferiority is shown with `power`, if nothing changed: variance · (z_1−α + z_power)² / margin².

    `variance` of one unit's difference. Paired binary items: the discordance rate (Julious, 2004,
    https://doi.org/10.1002/sim.1783, at no difference). Documents: the variance of their mean differences. Infinite if it is.
    """
    check_alpha(alpha)
    if not margin > 0:
        raise KvlabError(f"margin = {margin}; give a loss greater than 0 that you would put up with")
    needed = variance * (special.ndtri(1 - alpha) + special.ndtri(power)) ** 2 / margin**2
    return math.ceil(needed) if math.isfinite(needed) else math.inf


def minimum_detectable(error: float, clusters: float = math.inf, alpha: float = 0.05, power: float = POWER) -> float:
    """The smallest margin that a standard error settles with `power`, if nothing changed: (z_1−α + z_power) · error.

    With few clusters the factor is the noncentrality at which Student's test has that power (Julious, 2004).
    """
    check_alpha(alpha)
    return noncentrality(clusters, alpha, power) * error if clusters > 1 else math.inf


def median_unbiased(error: float, clusters: float) -> float:
    """An estimated standard error as likely too small as too large: divided by √(median of χ² / degrees of freedom)."""
    return error / math.sqrt(special.chdtri(clusters - 1, 0.5) / (clusters - 1)) if math.isfinite(clusters) else error


@functools.lru_cache
def noncentrality(clusters: float, alpha: float, power: float) -> float:
    """Of Student's t, in standard errors, at which the one-sided test has that power."""
    normal = float(special.ndtri(1 - alpha) + special.ndtri(power))
    if clusters > 1000:
        return normal
    critical = student(1 - alpha, clusters)
    return float(optimize.brentq(lambda x: special.nctdtr(clusters - 1, x, critical) - (1 - power), normal / 2, 40 * normal))
