"""Intervals and verdicts: against figures worked by hand or by scipy, and their error rates on simulated clusters."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from kvlab.errors import KvlabError
from kvlab.evaluate import clusters, sample_size, statistics, verdict

RUNS = 1000


# ----------------------------------------------------------------------------------------------------- against known figures


def test_items_needed_for_a_margin_of_three_tenths_of_a_point():
    for discordance, items in ((0.01, 6869), (0.02, 13739), (0.04, 27478)):
        assert abs(sample_size.units_needed(discordance, 0.003) - items) <= 1, "items are whole: ours are rounded up"
    assert abs(sample_size.units_needed(0.01, 0.01) - 618) <= 1 and abs(sample_size.units_needed(0.08, 0.01) - 4946) <= 1
    assert sample_size.units_needed(0.2**2, 0.05) == math.ceil(0.04 * (1.6448536 + 0.8416212) ** 2 / 0.0025)


def test_detectable_effect_and_items_needed_are_inverse():
    items = sample_size.units_needed(0.04, 0.01, alpha=0.025, power=0.9)
    assert sample_size.minimum_detectable(math.sqrt(0.04 / items), alpha=0.025, power=0.9) == pytest.approx(0.01, rel=1e-3)
    few = sample_size.minimum_detectable(0.01, clusters=4) / 0.01
    assert stats.nct.sf(stats.t.ppf(0.95, 3), 3, few) == pytest.approx(0.8) and few > 2.4865


def test_holm_by_hand():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.6]) == pytest.approx([1.0, 1.0])


def test_mcnemar_by_hand():
    """One gain, five losses of ten: two-sided 2 · (1 + 6) / 2⁶."""
    reference, policy = [1] * 5 + [0] * 5, [0] * 5 + [1] + [0] * 4
    assert statistics.mcnemar(policy, reference) == pytest.approx(14 / 64)
    assert statistics.mcnemar(policy, reference, "less") == pytest.approx(7 / 64)
    assert statistics.mcnemar([1, 0], [1, 0]) == 1


def test_wilson_is_scipys_for_independent_items():
    made = statistics.proportion([1] * 33 + [0] * 7, alpha=0.025)
    theirs = stats.binomtest(33, 40).proportion_ci(0.95, method="wilson")
    assert (made.low, made.high) == pytest.approx((theirs.low, theirs.high))
    assert (round(made.low, 2), round(made.high, 2)) == (0.68, 0.91)
    assert statistics.proportion([1] * 40, np.repeat(range(4), 10)).low < 0.5 < statistics.proportion([1] * 40).low


def test_tango_inverts_a_score_test_whose_likelihood_is_maximised_by_search():
    gains, losses, n = 3, 9, 60

    def z(delta):
        def cost(q):
            return -(gains * math.log(q + delta) + losses * math.log(q) + (n - gains - losses) * math.log(1 - 2 * q - delta))

        low, high = max(0.0, -delta), (1 - delta) / 2
        q = optimize.minimize_scalar(cost, bounds=(low + 1e-9, high - 1e-9), method="bounded", options={"xatol": 1e-12}).x
        return (gains - losses - n * delta) / math.sqrt(n * (2 * q + delta - delta**2))

    low, high = statistics.tango(gains, losses, n, 1.96)
    assert z(low) == pytest.approx(1.96, abs=1e-4) and z(high) == pytest.approx(-1.96, abs=1e-4)
    assert low < -0.1 < high


def test_tango_at_the_edges():
    """Without discordant pairs the ends are ±z² / (n + z²)."""
    end = 1.6**2 / (50 + 1.6**2)
    assert statistics.tango(0, 0, 50, 1.6) == pytest.approx((-end, end))
    low, high = statistics.tango(0, 5, 5, 1.6)
    assert low == -1 and -1 < high < 0
    low, high = statistics.tango(5, 0, 5, 1.6)
    assert high == 1 and 0 < low < 1


def test_variance_between_clusters_by_hand():
    """Clusters of 3 and 1 items with means 1 and 3: mean 1.5, totals off by −1.5 and +1.5, times 2/1, over 4²."""
    grouped = clusters.group([0, 1, 2, 3], ["a", "a", "a", "b"])
    assert grouped.variance() == pytest.approx((1.5**2 + 1.5**2) * 2 / 16)
    means = statistics.mean_difference([1.0, 2, 4], [0.0, 0, 0], range(3))
    assert means == statistics.mean([1.0, 2, 4], range(3)) == statistics.mean_difference([2.0, 3, 5], [1.0, 1, 1], range(3))
    theirs = stats.ttest_1samp([1.0, 2, 4], 0).confidence_interval(0.9)
    assert (means.low, means.high) == pytest.approx((theirs.low, theirs.high))


def test_the_bootstrap_resamples_whole_clusters(rng):
    values = np.repeat(rng.normal(size=60), 50) + rng.normal(size=3000) * 0.1
    names = np.repeat(np.arange(60), 50)
    low, high = statistics.bootstrap(clusters.group(values, names), seed=1)
    half = 1.645 * values.reshape(60, 50).mean(1).std(ddof=1) / math.sqrt(60)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
    assert (low, high) == statistics.bootstrap(clusters.group(values, names), seed=1)
    naive = statistics.bootstrap(clusters.group(values), seed=1)
    assert naive[1] - naive[0] < 0.3 * (high - low)


# ---------------------------------------------------------------------------------------------------------- edges of input


def test_no_discordant_pairs_prove_nothing_alone():
    few = verdict.binary([1] * 40, [1] * 40, 0.01)
    assert few.outcome == "underpowered" and few.low < -0.05 and few.high > 0.05 and few.items_needed > 500
    assert verdict.binary([1] * 1000, [1] * 1000, 0.01).outcome == "pass"
    clustered = verdict.binary([1] * 1000, [1] * 1000, 0.01, np.repeat(range(4), 250))
    assert clustered.outcome == "underpowered" and clustered.low < -0.5, "four clusters are four, however many items they hold"


def test_what_is_open_needs_more_than_there_is():
    """Where no answer changed, 36 contexts of four items still leave a margin of 5 points open."""
    context = np.repeat(np.arange(36), 4)
    made = verdict.binary(np.ones(144), np.ones(144), 0.05, context)
    assert made.outcome == "underpowered" and made.items_needed > 144 and made.clusters_needed > 36
    enough = np.repeat(np.arange(made.clusters_needed + 1), 4)
    assert verdict.binary(np.ones(len(enough)), np.ones(len(enough)), 0.05, enough).outcome == "pass"


def test_one_cluster_is_underpowered_and_says_why():
    for made in (verdict.binary([0, 0, 0], [1, 1, 1], 0.01, "aaa"), verdict.continuous([9.0, 9, 9], [1.0, 1, 2], 0.01, "aaa")):
        assert made.outcome == "underpowered" and "1 cluster" in made.reason and made.minimum_detectable_effect == math.inf


def test_equal_values_pass():
    made = verdict.continuous([1.0, 2, 3, 4], [1.0, 2, 3, 4], 0.01, "aabb")
    assert made.outcome == "pass" and made.low == made.high == 0 and "same difference" in made.reason


def test_outcomes_of_clear_cases(rng):
    reference = np.ones(2000)
    assert verdict.binary(rng.random(2000) > 0.2, reference, 0.05).outcome == "fail"
    assert verdict.binary(rng.random(2000) > 0.01, reference, 0.05).outcome == "pass"
    base = rng.normal(size=400)
    assert verdict.continuous(base + 1 + rng.normal(size=400) * 0.1, base, 0.5).outcome == "fail"
    assert verdict.continuous(base - 1 + rng.normal(size=400) * 0.1, base, 0.5).outcome == "pass"
    assert verdict.continuous(base - 1 + rng.normal(size=400) * 0.1, base, 0.5, worse="lower").outcome == "fail"


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: verdict.binary([], [], 0.01), "at least one item"),
        (lambda: verdict.continuous([1.0, math.nan], [1.0, 1.0], 0.01), "1 of 2 values are not finite"),
        (lambda: verdict.binary([1, math.nan], [1, 1], 0.01), "must be 0 or 1"),
        (lambda: verdict.binary([0.5], [1], 0.01), "must be 0 or 1"),
        (lambda: verdict.binary([1], [1, 0], 0.01), "pair them"),
        (lambda: verdict.binary([1, 0], [1, 0], 0.01, ["a"]), "2 values but 1 cluster"),
        (lambda: verdict.binary([1], [1], 0.0), "give a loss > 0"),
        (lambda: verdict.binary([1], [1], 0.1, alpha=0.5), "0 < alpha < 0.5"),
        (lambda: sample_size.units_needed(0.1, -1), "margin = -1"),
        (lambda: statistics.holm([math.nan]), "not finite"),
    ],
)
def test_wrong_input_is_refused_in_words(call, message):
    with pytest.raises(KvlabError, match=message):
        call()


# --------------------------------------------------------------------------------------------------- error rates and power


def rates(rng, mean, icc, count):
    """Beta-distributed rates of clusters with a given correlation within clusters."""
    if icc == 0 or mean == 0:
        return np.full(count, mean)
    return rng.beta(mean * (1 - icc) / icc, (1 - mean) * (1 - icc) / icc, count)


def binary_pairs(count, size, icc, discordance, rng, loss):
    """Items that a policy gains and loses in clusters; `loss` of them, on balance."""
    lost, gained = (np.repeat(rates(rng, (discordance + s * loss) / 2, icc, count), size) for s in (1, -1))
    draw = rng.random(count * size)
    worse = draw < lost
    better = ~worse & (rng.random(count * size) < gained / np.maximum(1 - lost, 1e-9))
    return better.astype(int), worse.astype(int), np.repeat(np.arange(count), size)


def nll_pairs(count, size, between, rng, loss):
    """Tokens whose difference has a part that the document shares."""
    shared = np.repeat(rng.normal(loss, between, count), size)
    reference = rng.normal(3, 1, count * size)
    return reference + shared + rng.normal(0, 0.3, count * size), reference, np.repeat(np.arange(count), size)


BINARY = [
    (4, 10, 0.0, 0.1),
    (4, 100, 0.2, 0.3),
    (10, 10, 0.4, 0.1),
    (40, 10, 0.1, 0.05),
    (40, 50, 0.4, 0.02),
]
NLL = [(4, 95, 0.05), (10, 95, 0.2), (30, 20, 0.1)]


def verdicts(kind, scenario, margin, loss, seed, runs=RUNS):
    made = []
    rng = np.random.default_rng(seed)
    for run in range(runs):
        if kind == "binary":
            policy, reference, names = binary_pairs(*scenario, rng, loss)
            made.append(verdict.binary(policy, reference, margin, names))
        else:
            policy, reference, names = nll_pairs(*scenario, rng, loss)
            made.append(verdict.continuous(policy, reference, margin, names, seed=run))
    return made


def share(made, outcome):
    return np.mean([v.outcome == outcome for v in made])


@pytest.mark.parametrize("kind,scenario", [("binary", s) for s in BINARY] + [("nll", s) for s in NLL])
def test_wrong_verdicts_are_rare(kind, scenario):
    """At a loss of exactly the margin both a pass and a fail are wrong, and each is as likely as it gets."""
    margin = min(scenario[3] if kind == "binary" else 0.05, 0.05)
    made = verdicts(kind, scenario, margin, margin, seed=1)
    assert share(made, "pass") <= 0.07 and share(made, "fail") <= 0.07
    if kind == "binary":  # for nats the same up to a shift
        assert share(verdicts(kind, scenario, 1e-9, 0.0, 2, 500), "fail") <= 0.07, "A/A: a loss is seen where there is none"


@pytest.mark.parametrize(
    "kind,scenario", [("binary", (40, 10, 0.1, 0.1)), ("binary", (400, 1, 0.0, 0.05)), *(("nll", s) for s in NLL)]
)
def test_the_stated_effect_is_detected(kind, scenario):
    stated = np.median([v.minimum_detectable_effect for v in verdicts(kind, scenario, 0.1, 0.0, 3, 300)])
    assert share(verdicts(kind, scenario, stated, 0.0, 4, 300), "pass") >= 0.75
    if kind == "nll":
        assert share(verdicts(kind, scenario, stated, 2 * stated, 5, 300), "fail") >= 0.75


def test_items_that_are_said_to_be_needed_suffice():
    rng = np.random.default_rng(6)
    needed = np.median([_aa(rng, 40).clusters_needed for _ in range(100)])
    settled = np.mean([_aa(rng, int(needed)).outcome == "pass" for _ in range(300)])
    assert 0.7 <= settled <= 0.95


def _aa(rng, count):
    policy, reference, names = binary_pairs(count, 10, 0.1, 0.1, rng, 0.0)
    return verdict.binary(policy, reference, 0.05, names)


def test_what_goes_wrong_without_clusters():
    """The two tests that these replace: items taken as independent, and a percentile bootstrap over four clusters."""
    rng = np.random.default_rng(7)
    wrong = {"naive": 0, "four": 0, "ours": 0}
    for _ in range(400):
        policy, reference, names = nll_pairs(4, 95, 0.1, rng, 0.0)
        tokens = policy - reference
        documents = tokens.reshape(4, 95).mean(1)
        wrong["naive"] += tokens.mean() > 1.645 * tokens.std(ddof=1) / math.sqrt(len(tokens))
        wrong["four"] += np.quantile(rng.choice(documents, (400, 4)).mean(1), 0.05) > 0
        wrong["ours"] += statistics.mean_difference(policy, reference, names).low > 0
    assert wrong["naive"] > 0.2 * 400 and wrong["four"] > 0.09 * 400 and wrong["ours"] <= 0.07 * 400
