"""What stays: naive oracles in numpy, one per rule, and the rules of budgets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.codec import Int8, Raw
from kvlab.core import EMPTY, PAGE, Record
from kvlab.core import kept as kept_tokens
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import Contiguous
from kvlab.loop import fill
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Protect, Window
from kvlab.selection import ReadAll
from tests import tools

pytestmark = pytest.mark.compiled_quickly


def kept(pos):
    return set(pos[pos >= 0].tolist())


@pytest.mark.parametrize("size,sinks", [(70, 4), (128, 0), (1, 2), (64, 64), (500, 4)])
@pytest.mark.parametrize("codec", [Raw(), Int8("channel")], ids=str)
def test_window_sees_sinks_and_recents_exactly(size, sinks, codec):
    """At every step a query sees {pos < sinks} ∪ {pos > t − size}, across evictions, for scales by token and by page."""
    s = tools.sequence(lengths=(150, 40))
    policy = Policy(Window(size, sinks), codec, Contiguous(), ReadAll())
    _, _, seen = tools.run(policy, s)
    for step in range(s.steps):
        for b in range(2):
            now = int(s.lengths[b]) + step
            want = {p for p in range(now + 1) if p < sinks or p > now - size}
            for h in range(2):
                pos = seen["pos"][step, b, h]
                rule = np.asarray(policy.retention.visibility().mask(pos, now))
                assert kept(np.where(rule, pos, EMPTY)) == want
            assert (seen["reads"][step, b] == len(want)).all()


def test_keep_all_keeps_all():
    s = tools.sequence()
    _, _, seen = tools.run(Policy(KeepAll(), Raw(), Contiguous(), ReadAll()), s)
    for b in range(2):
        assert kept(seen["pos"][-1, b, 0]) == set(range(int(s.lengths[b]) + s.steps))


def test_scores_follow_their_tokens_through_evictions():
    """Key norm, against a naive loop: a recycled slot must not inherit its victim's score."""
    s = tools.sequence(lengths=(150, 97))
    policy = tools.make("key_norm", "raw", "contiguous", "read_all")
    _, _, seen = tools.run(policy, s)
    for b, h in np.ndindex(2, 2):
        norm, n = np.linalg.norm(s.key[b, h], axis=-1), int(s.lengths[b])
        held = sorted(sorted(range(n), key=lambda p: np.inf if p == n - 1 else -norm[p])[-96:])
        for step in range(s.steps):
            now = n + step
            if len(held) == 96:
                held.remove(min(held, key=lambda p: (-norm[p], p)))
            held.append(now)
            assert kept(seen["pos"][step, b, h]) == set(held), step


@given(st.integers(1, 300), st.integers(1, 200), st.integers(0, 80), st.sampled_from([Raw(), Int8("channel")]))
@settings(max_examples=30, deadline=None)
def test_budgets_are_whole_units_within_the_sequence(total, size, sinks, codec):
    policy = Policy(Window(size, sinks), codec, Contiguous(), ReadAll())
    budget = policy.budget(total, total)
    assert budget % policy.unit == 0 and 1 <= budget < total + policy.unit
    assert policy.unit > 1 or budget == min(total, size + sinks)


def test_ties_keep_the_newest_in_a_prompt_and_evict_the_oldest():
    """CASES 2's mask, for scores that are all equal."""

    class Flat(tools.KeyNorm):
        def priority(self, state, pos, now):
            return jnp.where(pos < 2, jnp.inf, 0.0 * pos)

    policy = Policy(tools.part(Flat)(8), Raw(), Contiguous(), ReadAll())
    zeros = jnp.zeros((1, 1, 64, 16), jnp.float32)
    record = Record(zeros, zeros, jnp.where(jnp.arange(64) < 20, jnp.arange(64), EMPTY)[None])
    cache = fill(policy, record, 8)
    assert kept(np.asarray(cache.pos)) == {0, 1, *range(14, 20)}
    cache = jax.jit(policy.append)(cache, zeros[:, :, 0], zeros[:, :, 0], jnp.array([20]))
    assert kept(np.asarray(cache.pos)) == {0, 1, *range(15, 21)}


def test_refusals_name_the_ways_out():
    with pytest.raises(RefusedPolicy, match="unit=64.*scale per token"):
        Policy(tools.KeyNorm(), Int8("channel"), Contiguous(), ReadAll())
    with pytest.raises(RefusedPolicy, match="allowed: None, 1 or 64"):
        Policy(tools.KeyNorm(96, 16), Raw(), Contiguous(), ReadAll())
    with pytest.raises(ConfigError, match="size must be"):
        Window(0)


def test_rows_that_are_not_live_stay_as_they_were():
    s = tools.sequence()
    policy = Policy(Window(70, 4), Int8("channel"), Contiguous(), ReadAll())
    cache = fill(policy, s.record, policy.budget(150, 290))
    key, value = tools.appended(s)
    pos = jnp.asarray(s.lengths + np.arange(70)[:, None])
    after = tools.append(policy, cache, key[:70], value[:70], pos, jnp.array([True, False]))
    second = lambda c: [np.asarray(x)[1] for x in (c.pos, c.opened, c.waiting, c.offset, *c.tail, c.memory["k"]["x"])]
    for a, b in zip(second(cache), second(after)):
        np.testing.assert_array_equal(a, b)
    assert kept(np.asarray(after.pos[0, 0])) >= set(range(151, 220))


@pytest.mark.parametrize("scale", ["token", "channel"])
def test_a_rotating_window_of_eight_holds_the_codes_of_the_last_eight(scale):
    """CASES 16: 20 tokens through a window of 8 read as INT8 of the last 8 (of their aligned page), across the wrap."""
    s = tools.sequence(lengths=(1, 1), bucket=64, steps=160)
    policy = Policy(Window(8, 0), Int8(scale), Contiguous(), ReadAll())
    _, _, seen = tools.run(policy, s)
    for step in (19, 70, 159):
        now, rows = 1 + step, np.arange(1 + step - 7, 2 + step)
        for b, h in np.ndindex(2, 2):
            held = []
            for x in (s.key[b, h], s.value[b, h]):
                coded = np.concatenate([tools.through(policy.codec, x[n : n + PAGE]) for n in range(0, now + 1, PAGE)])
                open_page = policy.tailed and (now + 1) % PAGE
                exact = rows >= (now // PAGE * PAGE if open_page else now + 1)
                held.append(np.where(exact[:, None], x[rows], coded[rows]))
            logits = s.query[step, b, h] @ held[0].T * s.spec.scale
            weight = np.exp(logits - logits.max(-1, keepdims=True))
            np.testing.assert_allclose(seen["out"][step, b, h], weight / weight.sum(-1, keepdims=True) @ held[1], atol=1e-5)


@pytest.mark.parametrize(
    "length,ratio,left", [(2, 0.6, 1), (10, 0.9, 1), (100, 0.9, 10), (100, 0.0, 100), (1, 0.99, 1), (7, 1, 0), (1000, 0.999, 1)]
)
def test_budgets_round_as_the_rule_says(length, ratio, left):
    """CASES 1: no budget is lost to floating point, none rounds to nothing; everything goes only if that is asked for."""
    assert kept_tokens(length, ratio) == left


@given(st.integers(1, 100_000), st.integers(0, 999))
def test_the_rounding_rule_is_the_floor_of_exact_arithmetic(length, permille):
    assert kept_tokens(length, permille / 1000) == max(1, length * (1000 - permille) // 1000)


def test_a_ratio_outside_its_range_is_refused():
    with pytest.raises(ConfigError, match="ratio=1.5; allowed: 0 .remove nothing. … 1"):
        kept_tokens(10, 1.5)


@tools.part
class Flat(tools.KeyNorm):
    """Every token is worth the same, in bfloat16, where adding one to the largest score changes nothing."""

    def priority(self, state, pos, now):
        return jnp.full_like(state, 512.0).astype(jnp.bfloat16)


@tools.part
class Oldest(tools.KeyNorm):
    """The oldest goes last: what a protected set must overrule."""

    def priority(self, state, pos, now):
        return -pos.astype(jnp.float32)


append = jax.jit(lambda policy, *args: policy.append(*args))


def flat_record(n, bucket=64):
    zeros = jnp.zeros((1, 1, bucket, 16), jnp.float32)
    return Record(zeros, zeros, jnp.where(jnp.arange(bucket) < n, jnp.arange(bucket), EMPTY)[None]), zeros


def test_protected_tokens_lose_no_tie():
    """CASES 2: eight equal tokens, two sinks, four kept: 0 and 1 are among them; also while decoding."""
    record, zeros = flat_record(8)
    policy = Policy(Protect(Flat(4), sinks=2, recent=1), Raw(), Contiguous(), ReadAll())
    cache = fill(policy, record, policy.budget(8, 64))
    assert kept(np.asarray(cache.pos)) == {0, 1, 6, 7}
    for pos in range(8, 30):
        cache = append(policy, cache, zeros[:, :, 0], zeros[:, :, 0], jnp.array([pos]))
        assert {0, 1, pos} <= kept(np.asarray(cache.pos)) and len(kept(np.asarray(cache.pos))) == 4


def test_recent_tokens_stay_under_a_rule_that_would_drop_them():
    record, zeros = flat_record(40)
    policy = Policy(Protect(Oldest(16), sinks=0, recent=6), Raw(), Contiguous(), ReadAll())
    cache = fill(policy, record, 16)
    assert kept(np.asarray(cache.pos)) == {*range(10), *range(34, 40)}
    for pos in range(40, 50):
        cache = append(policy, cache, zeros[:, :, 0], zeros[:, :, 0], jnp.array([pos]))
        assert {*range(pos - 5, pos + 1)} <= kept(np.asarray(cache.pos))


def test_a_rule_that_holds_everything_dear_yields_to_protection():
    record, zeros = flat_record(64)
    policy = Policy(Protect(Window(10, 100), sinks=2, recent=4), Raw(), Contiguous(), ReadAll())
    cache = fill(policy, record, 16)
    for pos in range(64, 80):
        cache = append(policy, cache, zeros[:, :, 0], zeros[:, :, 0], jnp.array([pos]))
        assert {0, 1, *range(pos - 3, pos + 1)} <= kept(np.asarray(cache.pos))


def test_protecting_more_than_fits_is_refused():
    """CASES 3: fewer slots than sinks is an error that says so, not a cache of sinks alone."""
    policy = Policy(Protect(Flat(2), sinks=4, recent=1), Raw(), Contiguous(), ReadAll())
    with pytest.raises(ConfigError, match="sinks=4 and recent=1 need 5 tokens.*keeps 2"):
        policy.budget(8, 64)
    pages = Policy(Protect(Flat(64, PAGE), sinks=4, recent=64), Int8("channel"), Contiguous(), ReadAll())
    with pytest.raises(ConfigError, match="need 192 tokens.*keeps 64"):
        pages.budget(300, 384)


def test_protection_reaches_through_a_window_and_pages():
    s = tools.sequence(lengths=(150, 150), steps=130)
    policy = Policy(Protect(Window(60, 0), sinks=5, recent=64), Int8("channel"), Contiguous(), ReadAll())
    _, _, seen = tools.run(policy, s, budget=256)
    for step in (0, 70, 129):
        rule = np.asarray(policy.retention.visibility().mask(seen["pos"][step, 0, 0], 150 + step))
        visible = kept(np.where(rule, seen["pos"][step, 0, 0], EMPTY))
        assert visible == {*range(5), *range(150 + step - 63, 151 + step)}
