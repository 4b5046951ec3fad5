"""Looks and searches: boundaries against published ones, and error rates on simulated clusters. Numpy and scipy only."""

import math

import numpy as np
import pytest
from scipy import special, stats

from kvlab.errors import KvlabError
from kvlab.evaluate import sequential, statistics
from kvlab.evaluate.sequential import FAIL, FUTILE, OPEN, PASS

FIFTHS = tuple(np.arange(1, 6) / 5)
ALPHA, MARGIN, DISCORDANCE, ICC = 0.05, 0.05, 0.08, 0.1


def test_boundaries_are_the_published_ones():
    """Spending like O'Brien & Fleming and like Pocock, one-sided 0.025 over five looks (Jennison & Turnbull, 2000, chapter 7)."""
    fleming = 2 * special.ndtr(special.ndtri(0.025 / 2) / np.sqrt(FIFTHS))
    pocock = 0.025 * np.log(1 + (math.e - 1) * np.array(FIFTHS))
    assert sequential.boundaries(FIFTHS, fleming) == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=1e-3)
    assert sequential.boundaries(FIFTHS, pocock) == pytest.approx([2.438, 2.427, 2.410, 2.397, 2.386], abs=1e-3)


def test_all_looks_together_err_as_often_as_one(rng):
    """By drawn paths, at unequal shares of the samples."""
    shares = (0.1, 0.3, 0.35, 1.0)
    levels = sequential.levels(0.05, shares, 2.0)
    paths = np.cumsum(rng.normal(size=(200_000, 4)) * np.sqrt(np.diff((0, *shares))), 1) / np.sqrt(shares)
    crossed = np.maximum.accumulate(paths > -special.ndtri(levels), axis=1).mean(0)
    assert crossed == pytest.approx(0.05 * np.square(shares), abs=0.002)
    assert sequential.levels(0.05, (1.0,), 2.0) == pytest.approx([0.05])


def test_predictive_power_by_hand(rng):
    """Half of the samples at z = 1: the second half's drift is as uncertain as the first half's."""
    plan = sequential.Plan.of((0.5, 1.0), 0.05, 0.05)
    drift = rng.normal(1 / math.sqrt(0.5), math.sqrt(1 / 0.5), 400_000)
    end = math.sqrt(0.5) + drift * 0.5 + rng.normal(0, math.sqrt(0.5), 400_000)
    share = (end > -special.ndtri(plan.passing[-1])).mean()
    assert sequential.predicted(1.0, plan, 0) == pytest.approx(share, abs=0.003)


def curve(shape, values):
    """True losses of the values, mildest first."""
    return {
        "flat": np.full(values, MARGIN),  # each of them loses just too much
        "steep": np.where(np.arange(values) < values // 2, 0.0, MARGIN),
        "rising": np.linspace(0, 2 * MARGIN, values),
        "none": np.zeros(values),  # A/A: noise alone
        "cliff": np.where(np.arange(values) < values // 2, 0.0, 0.5),
    }[shape]


class Drawn:
    """Contexts whose items every value answers: the same draws for all, so that what a value loses the next one loses too."""

    def __init__(self, rng, losses, contexts, size):
        self.losses, self.size, self.contexts = losses, size, contexts
        self.names = np.repeat(np.arange(contexts), size)
        self.draw, self.other = rng.random((2, contexts * size))
        spread = rng.beta((1 - ICC) / ICC * 0.5, (1 - ICC) / ICC * 0.5, contexts) * 2  # a context's rate over the mean rate
        self.spread = np.repeat(spread, size)
        self.spent = 0

    def pairs(self, value, contexts):
        """The policy's answers and the full cache's."""
        n = contexts * self.size
        noise = max(DISCORDANCE - self.losses[value], 0.0) / 2
        worse = self.draw[:n] < (noise + self.losses[value]) * self.spread[:n]
        better = ~worse & (self.other[:n] < noise * self.spread[:n])
        return better.astype(int), worse.astype(int)

    def visit(self, value, level, looks=FIFTHS, failing=ALPHA / 3):
        plan = sequential.Plan.of(looks, level, failing)
        for number, share in enumerate(looks):
            contexts = round(share * self.contexts)
            mine, full = self.pairs(value, contexts)
            names = self.names[: len(mine)]
            seen = sequential.look(
                lambda level, a=mine, b=full, c=names: statistics.binary_difference(a, b, c, level), MARGIN, plan, number
            )
            if seen.state != OPEN:
                break
        self.spent += contexts
        return seen.state


def searches(shape, values=7, contexts=40, size=10, runs=300, seed=0, looks=FIFTHS):
    """What so many searches found, the states that each visited value got, and contexts spent."""
    rng = np.random.default_rng(seed)
    found, states, spent = [], [], []
    for _ in range(runs):
        drawn, seen = Drawn(rng, curve(shape, values), contexts, size), {}

        def visit(value, level, drawn=drawn, seen=seen):
            seen[value] = drawn.visit(value, level, looks)
            return seen[value]

        found.append(sequential.bisect(values, ALPHA, visit))
        states.append(seen)
        spent.append(drawn.spent)
    return np.array(found), states, np.array(spent)


@pytest.mark.parametrize("shape,least", [("flat", 0), ("steep", 3), ("rising", 3)])
@pytest.mark.parametrize("contexts,size", [(40, 10), (200, 2)])
def test_a_value_that_loses_the_margin_is_seldom_returned(shape, least, contexts, size):
    """Losses at the margin are where a wrong answer is likeliest; the bound is alpha and three standard errors of 300 runs."""
    found, _, _ = searches(shape, contexts=contexts, size=size)
    assert (curve(shape, 7)[least:] >= MARGIN).all() and (curve(shape, 7)[:least] < MARGIN).all()
    assert (found >= least).mean() <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 300)


def test_the_whole_level_for_every_value_would_not_do():
    """Why a bisection shares alpha out: independent values on a flat curve, three of them visited."""
    rng = np.random.default_rng(1)

    def wrong(level_of):
        visit = lambda _, level: PASS if rng.random() < level_of(level) else FAIL
        return np.mean([sequential.bisect(7, ALPHA, visit) >= 0 for _ in range(4000)])

    naive, ours = wrong(lambda _: ALPHA), wrong(lambda level: level)
    assert naive > 2 * ALPHA and ours <= ALPHA + 0.011


def test_levels_of_any_path_sum_up_to_alpha_at_most():
    """And a value is visited once, at most depth(values) of them."""
    for values in (1, 2, 3, 7, 10, 16):
        for truth in range(values + 1):
            levels, visited = [], []

            def visit(value, level, truth=truth, levels=levels, visited=visited):
                visited.append(value)
                if value >= truth:
                    levels.append(level)
                return PASS if value < truth else FAIL

            assert sequential.bisect(values, ALPHA, visit) == truth - 1
            assert sum(levels) <= ALPHA + 1e-12 and len(set(visited)) == len(visited) <= sequential.depth(values)
            assert truth < values or visited[-1] == values - 1, "the next value was always visited"


def test_good_values_are_found_and_hopeless_ones_cost_little():
    found, states, spent = searches("cliff", contexts=200, size=10, runs=60)
    assert (found == 2).mean() > 0.9
    hopeless = [state for seen in states for value, state in seen.items() if value >= 3]
    assert set(hopeless) == {FAIL}
    assert spent.mean() < 0.75 * 3 * 200, "three values at all contexts would cost that"


def test_losses_are_not_seen_where_there_are_none():
    _, states, _ = searches("none", runs=200)
    assert np.mean([FAIL in seen.values() for seen in states]) <= ALPHA


def test_states_of_clear_cases():
    plan = sequential.Plan.of((0.5, 1.0), 0.05, 0.05)

    def state(losses, of, number, margin=0.05, size=1):
        a, b = np.ones(of), np.ones(of)
        a[:losses] = 0
        names = np.repeat(np.arange(of // size), size)
        return sequential.look(lambda level: statistics.binary_difference(a, b, names, level), margin, plan, number).state

    assert state(0, 400, 0) == PASS and state(100, 400, 0) == FAIL
    assert state(24, 400, 0) == FUTILE, "it would have to turn round in what is left"
    assert state(1, 40, 0) == OPEN and state(1, 40, 1) == OPEN, "few samples settle nothing"
    assert sequential.together([PASS, PASS]) == PASS and sequential.together([PASS, FAIL]) == FAIL
    assert sequential.together([OPEN, FUTILE]) == FUTILE and sequential.together([PASS, OPEN]) == OPEN


def test_one_cluster_is_no_reason_to_give_up():
    plan = sequential.Plan.of((0.5, 1.0), 0.05 / 3, 0.05 / 3)
    for bounds in (statistics.unskewed, statistics.binary_difference):
        seen = sequential.look(lambda a, b=bounds: b(np.ones(4), np.ones(4), [0] * 4, a), 0.1, plan, 0)
        assert seen.state == OPEN and math.isnan(seen.chance)
    assert sequential.look(lambda a: statistics.unskewed(np.ones(4), np.ones(4), [0, 0, 1, 1], a), 0.1, plan, 0).state == PASS


def test_nats_a_token_get_worse_upwards():
    plan = sequential.Plan.of((1.0,), 0.05, 0.05)
    values = np.random.default_rng(0).normal(0.2, 0.01, 20)

    def seen(values, margin):
        zero = np.zeros(len(values))
        names = range(len(values))
        return sequential.look(lambda a: statistics.unskewed(values, zero, names, a), margin, plan, 0, "higher")

    values = np.concatenate([values, 0.4 - values])  # no skew
    half = stats.t.ppf(0.95, 39) * values.std(ddof=1) / math.sqrt(40)
    assert seen(values, 0.3).high == pytest.approx(values.mean() + half)
    assert [seen(values, m).state for m in (0.3, 0.1)] == [PASS, FAIL] and seen(-values, 0.1).state == PASS


def test_losses_that_few_documents_carry_do_not_pass_much_more_often():
    """Log-normal losses of 40 documents, the margin on average, looked at five times. Plain Student bounds pass 12 %."""
    rng, passes = np.random.default_rng(3), 0
    plan = sequential.Plan.of(FIFTHS, 0.05, 0.05)
    for _ in range(600):
        loss = rng.lognormal(0, 0.5, 40) / math.exp(0.125) * MARGIN
        for number in range(5):
            part = loss[: 8 * (number + 1)]
            bounds = lambda a, part=part: statistics.unskewed(part, np.zeros(len(part)), range(len(part)), a)
            state = sequential.look(bounds, MARGIN, plan, number, "higher").state
            if state != OPEN:
                break
        passes += state == PASS
    assert passes / 600 <= 0.095


def test_skew_moves_the_bounds_as_worked_by_hand():
    """Two documents of four lose 0, 0, 0 and 4: mean 1, error 1, skewness 6 / 3^1.5, so g = 0.577."""
    made = statistics.unskewed([0.0, 0, 0, 4], np.zeros(4), range(4), 0.05)
    t = (made.value - made.low, made.value - made.high)
    g = 6 / 3**1.5 / 2
    assert made.value == 1 and [x + g * (2 * x * x + 1) / 6 + g * g * x**3 / 27 for x in t] == pytest.approx(
        [stats.t.ppf(0.95, 3), -stats.t.ppf(0.95, 3)]
    )
    assert made.high - 1 > 2.3534 > 1 - made.low


def test_wrong_levels_are_refused():
    with pytest.raises(KvlabError, match="0 < alpha < 0.5"):
        sequential.bisect(3, 0.6, lambda index, level: PASS)
    with pytest.raises(KvlabError, match="0 < alpha < 0.5"):
        sequential.Plan.of((1.0,), 0.0, 0.1)
