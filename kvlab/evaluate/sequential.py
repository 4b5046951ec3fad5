"""Non-inferiority looked at several times while samples come in, and a search that asks it of several values.

A point is looked at at the shares t₁ < … < t_L = 1 of its samples. Look l shows a loss below the margin where the bound at level
a_l says so. The levels are those at which a Brownian motion is first above its boundary with probability α(t_l) − α(t_l−1)
(Lan & DeMets, 1983, https://doi.org/10.1093/biomet/70.3.659), α(t) = alpha · t^ρ (Kim & DeMets, 1987,
https://doi.org/10.1093/biomet/74.1.149): all looks together err with probability alpha at most. They are used as levels of
Student's bounds, which serves with few clusters too (Jennison & Turnbull, 2000, chapter 11.3).
Stopping for a loss or for futility can only make a pass rarer, so it costs none of alpha.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, special

from kvlab.evaluate.clusters import check_alpha, student
from kvlab.evaluate.statistics import Estimate
from kvlab.evaluate.verdict import items_needed

PASS, FAIL, FUTILE, OPEN = "pass", "fail", "futile", "open"
PASSING, FAILING = 2.0, 1.0  # ρ: a pass waits for samples, a loss is told as early as it shows
HOPE = 0.05  # with a smaller chance of a pass a point is given up
GRID, REACH = 801, 8.0  # points, and standard deviations, of the density between two looks


@functools.lru_cache
def levels(alpha: float, shares: tuple[float, ...], power: float) -> tuple[float, ...]:
    """One-sided level of each look at `shares` of the samples, rising up to 1, that spends alpha · share^power."""
    check_alpha(alpha)
    spent = [alpha * t**power for t in shares]
    return tuple(float(special.ndtr(-z)) for z in boundaries(shares, spent))


def boundaries(shares: Sequence[float], spent: Sequence[float]) -> list[float]:
    """Critical values of a standard normal at each look, crossed for the first time there with the increments of `spent`.

    By recursion over the density of those that have not crossed (Armitage, McPherson & Rowe, 1969, J. R. Statist. Soc. A 132,
    235–244), on the scale Z √t, whose increments are independent.
    """
    made = [float(-special.ndtri(spent[0]))]
    place, density = _cut(made[0], shares[0])
    density = density * np.exp(-(place**2) / 2 / shares[0]) / math.sqrt(2 * math.pi * shares[0])
    for before, now, chance in zip(shares, shares[1:], np.diff(spent)):
        step = math.sqrt(now - before)
        crossing = lambda z: float(density @ special.ndtr((place - z * math.sqrt(now)) / step)) - chance  # noqa: B023
        made.append(float(optimize.brentq(crossing, -REACH, 2 * REACH)))
        reached, weight = _cut(made[-1], now)
        kernel = np.exp(-(((reached[:, None] - place) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        place, density = reached, weight * (kernel @ density)
    return made


def _cut(z: float, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Places below the boundary, and Simpson's weights."""
    place = np.linspace(-REACH * math.sqrt(share), z * math.sqrt(share), GRID)
    weight = np.full(GRID, 2.0)
    weight[1::2], weight[[0, -1]] = 4.0, 1.0
    return place, weight * (place[1] - place[0]) / 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """When a point is looked at, and the levels at which it passes and fails there."""

    shares: tuple[float, ...]
    passing: tuple[float, ...]
    failing: tuple[float, ...]

    @classmethod
    def of(cls, shares: Sequence[float], passing: float, failing: float) -> "Plan":
        """For one-sided errors over all looks of `passing` and `failing`. Errors: KvlabError for a level out of 0 … 0.5."""
        at = tuple(shares)
        return cls(at, levels(passing, at, PASSING), levels(failing, at, FAILING))


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a look shows: `state` is pass, fail, futile or open; `low` and `high` hold over all looks.

    difference, low, high: policy − reference in the items' unit. items, clusters: what was compared. chance: of a pass with all
    samples, not a number while nothing is known of it. needed: items that settle the margin with power 0.8 if nothing changed.
    """

    state: str
    difference: float
    low: float
    high: float
    margin: float
    items: int
    clusters: int
    chance: float
    needed: float


def look(estimate: Callable[[float], Estimate], margin: float, plan: Plan, number: int, worse: str = "lower") -> Seen:
    """Look `number` at a point; `estimate(level)` is the difference so far with bounds at that one-sided level."""
    strict, other = estimate(plan.passing[number]), estimate(plan.failing[number])
    value, items, clusters = strict.value, strict.items, strict.clusters
    low, high = (strict.low, other.high) if worse == "lower" else (other.low, strict.high)
    loss, most, least = (-value, -low, -high) if worse == "lower" else (value, high, low)
    chance = predicted(_score(strict, margin - loss, most - loss, plan.passing[number]), plan, number)
    last = number + 1 == len(plan.shares)
    state = PASS if most < margin else FAIL if least > margin else FUTILE if chance < HOPE and not last else OPEN
    needed = items_needed(strict, margin, plan.passing[-1])
    return Seen(state, value, low, high, margin, items, clusters, float(state == PASS) if last else chance, needed)


def _score(estimate: Estimate, distance: float, half: float, level: float) -> float:
    """How far from the margin, as a standard normal value as unlikely as Student's; not a number where clusters are too few."""
    degrees = estimate.clusters if estimate.clustered else math.inf
    if not (degrees > 1 and math.isfinite(half)):
        return math.nan
    error = half / student(1 - level, degrees)
    t = distance / error if error > 0 else math.copysign(math.inf, distance)
    tail = special.stdtr(degrees - 1, -abs(t)) if math.isfinite(degrees) else special.ndtr(-abs(t))
    return math.copysign(min(-float(special.ndtri(tail)), 2 * REACH), t)


def predicted(z: float, plan: Plan, number: int) -> float:
    """Chance that the last look passes: Φ((z/√t − c) √(t/(1 − t))), c its boundary, with what is seen so far as all that is known
    (predictive power; Spiegelhalter, Freedman & Blackburn, 1986, Control. Clin. Trials 7, 8–17)."""
    share = plan.shares[number]
    if share >= 1:
        return math.nan
    last = -special.ndtri(plan.passing[-1])
    return float(special.ndtr((z / math.sqrt(share) - last) * math.sqrt(share / (1 - share))))


def together(states: Sequence[str]) -> str:
    """Of several scores of one point: it passes when all pass (Berger, 1982, Technometrics 24, 295–300), fails when one fails."""
    return next((state for state in (FAIL, FUTILE, OPEN) if state in states), PASS)


def depth(values: int) -> int:
    """How many of so many values a bisection visits at most."""
    return values.bit_length()


def bisect(values: int, alpha: float, visit: Callable[[int, float], str]) -> int:
    """The last of the values 0 … values − 1 that passes, −1 if none does; `visit(index, level)` gives a state.

    Values are ordered so that losses only grow. A value that does not pass costs its level, one that passes costs nothing; the
    next gets what is left over the steps that may follow. So a value that loses the margin or more is returned with probability
    alpha at most: up to the first wrong pass, the values visited of that kind lie on one path that the truth fixes (once a pass
    is missed only good values follow), and levels along any path sum up to alpha at most. The whole of alpha for every value
    would not do: on a flat curve several bad ones get their chance.
    """
    check_alpha(alpha)
    passed, refused, left = -1, values, alpha
    while refused - passed > 1:
        middle, level = (passed + refused) // 2, left / depth(refused - passed - 1)
        if visit(middle, level) == PASS:
            passed = middle
        else:
            refused, left = middle, left - level
    return passed
