"""Retentions that go by attention: each rule written as loops in numpy, at fill and while decoding."""

import dataclasses
import functools

import numpy as np
import pytest

from kvlab import parts
from kvlab.attention import AttentionSpec
from kvlab.codec import Int8, Raw
from kvlab.core import PAGE
from kvlab.decode import Engine, budgets, needs, per_layer
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import Contiguous, PageMajor
from kvlab.loop import fill
from kvlab.policy import Policy
from kvlab.retention import H2O, TOVA, ObservedAttention, Protect, PyramidKV, SnapKV
from kvlab.selection import ReadAll
from tests import tools

pytestmark = pytest.mark.compiled_quickly

BUDGET = 40
SPEC = AttentionSpec(3 * 32**-0.5, window=None, softcap=4.0)  # sharp, so that newcomers collect; a soft cap that is felt


def plain(retention, codec=None, layout=None):
    return Policy(retention, codec or Raw(), layout or Contiguous(), ReadAll())


def weights(query_GD, keys, spec):
    """One token's attention over `keys [n, D]`, the mean over its query heads."""
    total = np.zeros(len(keys))
    for query in query_GD.astype(np.float64):
        exp = np.exp(np.asarray([spec.softcap * np.tanh(query @ key * spec.scale / spec.softcap) for key in keys]))
        total += exp / exp.sum() / len(query_GD)
    return total


# ---------------------------------------------------------------------------------------------------- the naive rules
# `start` makes a prompt's scores from its attention (attention[head][query] over the tokens up to that query), `step` the
# scores after another token, from what it gave those held; tokens in `safe` never go.


class NaiveH2O:
    recent = BUDGET // 4

    def start(self, attention, head, n):
        return {i: sum(attention[head][q][i] for q in range(i, n)) for i in range(n)}

    def step(self, scores, given, head, now):
        return {i: scores.get(i, 0) + w for i, w in given[head].items()}

    def safe(self, pos, newest, coming):
        return pos > coming - self.recent


class NaiveObserved:
    """Holds sums; they are divided when they are compared."""

    def start(self, attention, head, n):
        return {i: sum(attention[head][q][i] for q in range(i, n)) / (n - i) for i in range(n)}

    def step(self, scores, given, head, now):
        return {i: (scores.get(i, 0) * (now - i) + w) / (now - i + 1) for i, w in given[head].items()}

    def safe(self, pos, newest, coming):
        return False


class NaiveTOVA:
    def start(self, attention, head, n):
        return {i: np.mean([attention[h][n - 1][i] for h in range(len(attention))]) for i in range(n)}

    def step(self, scores, given, head, now):
        return {i: np.mean([given[h][i] for h in range(len(given))]) for i in given[head]}

    def safe(self, pos, newest, coming):
        return pos == newest


class NaiveSnapKV:
    def __init__(self, window, kernel):
        self.window, self.kernel = window, kernel

    def start(self, attention, head, n):
        mean = {}
        for i in range(n):
            seen = [attention[head][q][i] for q in range(max(n - self.window, i, 0), n)]
            mean[i] = np.mean(seen)
        first = n - self.window  # of the window
        near = lambda i: [mean[j] for j in range(i - self.kernel // 2, i + self.kernel // 2 + 1) if 0 <= j < first]
        return {i: sum(near(i)) / self.kernel if i < first else mean[i] for i in range(n)}

    def step(self, scores, given, head, now):
        rate = 2 / (self.window + 1)
        return {i: w if i == now else (1 - rate) * scores[i] + rate * w for i, w in given[head].items()}

    def safe(self, pos, newest, coming):
        return pos > coming - self.window


def follow(rule, s, b, budget):
    """The tokens that each head of row `b` holds after the prompt and after every step."""
    n, heads = int(s.lengths[b]), range(s.key.shape[1])
    key, spec = s.key[b].astype(np.float64), s.spec
    attention = [[weights(s.prompt_query[b, q, h], key[h, : q + 1], spec) for q in range(n)] for h in heads]
    worth = lambda h, newest, coming: lambda p: (rule.safe(p, newest, coming), scores[h][p], p)
    scores = [rule.start(attention, h, n) for h in heads]
    held = [sorted(sorted(range(n), key=worth(h, n - 1, n - 1))[-budget:]) for h in heads]
    yield [set(x) for x in held]
    for step in range(s.steps):
        now, given = n + step, []
        for h in heads:
            if len(held[h]) == budget:
                held[h].remove(min(held[h], key=worth(h, now - 1, now)))
            held[h].append(now)
            given.append(dict(zip(held[h], weights(s.query[step, b, h], key[h, held[h]], spec))))
        scores = [rule.step(scores[h], given, h, now) for h in heads]
        yield [set(x) for x in held]


CASES = {
    "h2o": (H2O(size=BUDGET, recent=0.25), NaiveH2O()),
    "observed_attention": (ObservedAttention(size=BUDGET), NaiveObserved()),
    "tova": (TOVA(size=BUDGET, spec=SPEC), NaiveTOVA()),
    "snapkv": (SnapKV(size=BUDGET, spec=SPEC, window=8, kernel=5), NaiveSnapKV(8, 5)),
    "pyramidkv": (PyramidKV(size=32, spec=SPEC, window=8, kernel=3, beta=2, layer=1, layers=3), NaiveSnapKV(8, 3)),
}


def held(pos_NP):
    return set(pos_NP[pos_NP >= 0].tolist())


@functools.cache
def sequence():
    """One row is cut when the cache is filled, the other grows to the budget first; both evict while decoding."""
    return tools.sequence(lengths=(90, 29), bucket=128, steps=45, spec=SPEC)


@pytest.mark.parametrize("name", CASES)
def test_keeps_what_the_naive_rule_keeps(name):
    retention, rule = CASES[name]
    s, policy = sequence(), plain(retention)
    first, _, seen = tools.run(policy, s)
    assert first.budget == (32 if name == "pyramidkv" else BUDGET)
    for b in range(2):
        for step, want in enumerate(follow(rule, s, b, first.budget), start=-1):
            pos = np.asarray(first.pos) if step < 0 else seen["pos"][step]
            assert [held(pos[b, h]) for h in range(2)] == want, (b, step)
    same(policy, s, seen, (0, 20, 44))


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_pages_with_a_scale_each(name):
    """Evicting pages: outputs equal the dense oracle, the budget holds and the newest token is stored."""
    retention = dataclasses.replace(CASES[name][0], size=2 * PAGE)
    policy = plain(Protect(retention, sinks=2, recent=4), Int8("channel"), PageMajor())
    s = tools.sequence(lengths=(150, 97), steps=70, spec=SPEC)
    _, _, seen = tools.run(policy, s, 2 * PAGE)
    same(policy, s, seen, (0, 40, 69))


def same(policy, s, seen, steps):
    for step in steps:
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)
        for b, h in np.ndindex(2, 2):
            assert s.lengths[b] + step in held(seen["pos"][step, b, h])


# ------------------------------------------------------------------------------------------------------- single cases


def blank(n, H=1, G=1, D=16, steps=0, bucket=64):
    """Queries of zeros: every token gives all that it sees the same."""
    s = tools.sequence(lengths=(n,), bucket=bucket, steps=steps, H=H, G=G, D=D)
    return dataclasses.replace(s, query=0 * s.query, prompt_query=0 * s.prompt_query)


def test_a_token_of_h2o_lives_through_its_grace_period():
    """CASES 4: budget 4, ten steps of uniform attention: the newest two stay, and the cache does not freeze."""
    s = blank(4, steps=10)
    _, _, seen = tools.run(plain(H2O(size=4)), s)
    for step in range(10):
        kept, now = held(seen["pos"][step, 0, 0]), 4 + step
        assert kept == {0, 1, now - 1, now}


def test_h2o_sums_whole_columns():
    """CASES 5: six tokens, uniform attention: column i has Σ 1 / (q + 1) over all queries q ≥ i, not over the last two."""
    record = blank(6).prompt(("attention",))
    score = lambda x: x.score(record.key_BHTD, record.value_BHTD, record.pos_BT[:, None], **record.seen, budget=10)
    state = score(H2O(size=10))
    want = [sum(1 / (q + 1) for q in range(i, 6)) for i in range(6)]
    np.testing.assert_allclose(state["got"][0, 0], want + [0] * 58, atol=1e-6)
    np.testing.assert_array_equal(state["until"][0, 0, :6], np.arange(6) + 5)
    np.testing.assert_array_equal(score(H2O(size=10, recent=0.3))["until"][0, 0, :6], np.arange(6) + 3)


def test_a_prompt_shorter_than_the_window_keeps_what_fits():
    """CASES 6: twenty tokens under a window of 64, alone and beside a long row."""
    s = tools.sequence(lengths=(90, 20), bucket=128, steps=0)
    for size, want in ((32, set(range(20))), (12, set(range(8, 20)))):
        policy = plain(SnapKV(size=size))
        pos = np.asarray(fill(policy, s.prompt(policy.retention.needs), size).pos)
        assert held(pos[1, 0]) == held(pos[1, 1]) == want
        assert held(pos[0, 0]) == set(range(90 - size, 90))  # all of it window


def test_the_model_binds_its_soft_cap(tiny):
    model = dataclasses.replace(tiny.config, softcap=30.0)
    bound = plain(Protect(TOVA(size=8))).at(1, model)
    assert bound.retention.inner.spec == model.attention(1) and bound.at(1, model) == bound


# ------------------------------------------------------------------------------------------------------- the pyramid


def pyramid(prompt, layers=12, **options):
    return [PyramidKV(**options, layer=n, layers=layers).budget(prompt, 10**6, 1) for n in range(layers)]


def test_budgets_fall_in_a_line_and_keep_their_sum():
    got = pyramid(4000, ratio=0.8, window=32)  # 800 on average, 40 = 800 / 20 at the top
    assert got[0] == 1560 and got[-1] == 40 and abs(sum(got) - 12 * 800) <= 6
    assert max(np.abs(np.diff(got) + 1520 / 11)) < 1
    assert pyramid(4000, size=800, window=32) == got


def test_a_pyramid_is_cut_at_the_prompt_or_given_up():
    got = pyramid(1000, ratio=0.5, window=64)  # high would be 975: 936 is what lies before the window, 64 is left
    assert got[0] == 936 and got[-1] == 64 and sum(got) == 12 * 500
    assert pyramid(1000, ratio=0.6, window=64) == [400] * 12  # low would be 20
    assert pyramid(1000, size=990, window=64) == [990] * 12
    assert pyramid(4000, layers=1, ratio=0.8, window=32) == [800]


def test_every_layer_has_its_own_length(tiny):
    """CASES 8: layer budgets of 8 and 4: each layer stores, and each query reads, that many, by the layer's own scores."""
    table = {"name": "pyramidkv", "size": 6, "window": 2, "kernel": 1, "beta": 1.5}
    policies = per_layer(parts.policy({"retention": table}), tiny.config)
    assert budgets(policies, 20, 10) == (8, 4)
    engine, prompt = Engine(tiny), [list(range(40, 60))]
    records = engine.prefill(prompt, needs(policies))
    session = engine.start(records, policies, 10)
    for layer, (cache, record) in enumerate(zip(session.state.caches, records.records)):
        queries, key = np.asarray(record.seen["queries"]), np.asarray(record.key_BHTD)
        for h in range(2):
            mean = np.zeros(20)
            for w, g in np.ndindex(2, 3):
                exp = np.exp(queries[0, h, 62 + w, g] @ key[0, h, : 19 + w].T)
                mean[: 19 + w] += exp / exp.sum() / 6
            best = sorted(range(18), key=lambda i: mean[i])[-((8, 4)[layer] - 2) :]
            assert held(np.asarray(cache.pos[0, h])) == {*best, 18, 19}
    reads = session.run(10, watch={"reads"}).reads
    assert [set(np.ravel(x)) for x in np.moveaxis(np.asarray(reads), 1, 0)] == [{8}, {4}]


def test_layers_with_a_window_of_their_own_are_not_counted(tiny):
    model = dataclasses.replace(tiny.config, layers=5, windows=(8, None, 8, None, None))
    policies = per_layer(parts.policy({"retention": {"name": "pyramidkv", "size": 100, "window": 4}}), model)
    assert budgets(policies, 900, 100)[1::2] == (195, 100) and budgets(policies, 900, 100)[4] == 5
    assert budgets(policies, 900, 100)[0] == 8


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "make,says",
    [
        (lambda: H2O(size=8, recent=1.5), "recent=1.5; allowed: 0"),
        (lambda: SnapKV(size=8, window=65), "snapkv: window=65; allowed: 1 … 64"),
        (lambda: SnapKV(size=8, kernel=4), "kernel=4; allowed: odd"),
        (lambda: PyramidKV(size=8, beta=0.5), "beta=0.5; allowed: 1"),
        (lambda: PyramidKV(size=8).budget(10, 20, 1), "depends on the layer; write policy.at"),
        (lambda: TOVA(), "tova: ratio=None, size=None; give one"),
    ],
)
def test_refusals_say_what_is_allowed(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_what_observes_refuses_a_selection_that_leaves_out():
    for retention in (H2O(size=8), Protect(H2O(size=8))):
        with pytest.raises(RefusedPolicy, match="watches the attention"):
            Policy(retention, Raw(), Contiguous(), tools.LatePages())
