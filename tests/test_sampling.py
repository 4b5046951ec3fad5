"""Drawing tokens: filters against a naive oracle, rows independent of their batch, one trace for any settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import loop, sampling
from kvlab.codec import Int8, Raw
from kvlab.decode import Engine
from kvlab.errors import ConfigError
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Window
from kvlab.sampling import Sampling
from kvlab.selection import ReadAll

FULL = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())
PROMPTS = [np.random.default_rng(i).integers(0, 256, n).tolist() for i, n in enumerate((5, 90, 33, 64))]


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(tiny)


def naive(logits, seen, temperature, top_k, top_p, min_p, penalty):
    """The set of tokens that may be drawn, and their logits, by plain loops."""
    logits = [x / penalty if s and x > 0 else x * penalty if s else x for x, s in zip(logits.tolist(), seen)]
    logits = [x / temperature for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[: int(top_k)] if top_k else order
    total = sum(np.exp(logits[i]) for i in order)
    nucleus, mass = [], 0.0
    for i in order:
        if mass < top_p:
            nucleus.append(i)
        mass += np.exp(logits[i]) / total
    best = np.exp(logits[order[0]])
    return {i: logits[i] for i in nucleus if np.exp(logits[i]) >= min_p * best}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_k": 500},
        {"top_p": 0.6, "temperature": 1.5},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"repetition_penalty": 1.8, "top_k": 5},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_filters_equal_the_naive_oracle(settings):
    rng = np.random.default_rng(0)
    logits, seen = rng.standard_normal((3, 40)).astype(np.float32) * 2, rng.random((3, 40)) < 0.3
    got = np.asarray(sampling.filtered(Sampling(**settings).rows(3), jnp.asarray(logits), jnp.asarray(seen)))
    plain = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, **settings}
    for row in range(3):
        want = naive(logits[row], seen[row], *plain.values())
        assert set(np.flatnonzero(np.isfinite(got[row]))) == set(want)
        np.testing.assert_allclose([got[row, i] for i in want], list(want.values()), rtol=1e-5)


def test_draws_follow_the_distribution():
    """20,000 draws of one row: shares within four standard errors of softmax."""
    n, logits = 20_000, np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    how, many = Sampling(temperature=0.8).rows(n), jnp.tile(jnp.asarray(logits), (n, 1))
    drawn = np.asarray(sampling.draw(how, many, jnp.zeros((n, 4), bool), sampling.keys(0, n), jnp.zeros(n, int)))
    p = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    assert (abs(np.bincount(drawn, minlength=4) / n - p) < 4 * np.sqrt(p * (1 - p) / n)).all()


def test_a_row_draws_the_same_alone_and_in_a_batch(engine):
    policy = Policy(Window(40, 4), Int8(), Contiguous(), ReadAll())
    settings = {"temperature": [0.5, 1.0, 1.5, 0.0], "top_p": [0.9, 1.0, 0.8, 1.0], "repetition_penalty": [1.0, 1.3, 1.0, 1.1]}

    def tokens(rows, seeds):
        how = Sampling(**{k: [v[i] for i in rows] for k, v in settings.items()})
        prompt = engine.prefill([PROMPTS[i] for i in rows])
        session = engine.start(prompt, policy, 24, sampling=how, seed=seeds)
        session.run(24)
        return session.tokens

    together = tokens([0, 1, 2, 3], [7, 8, 9, 10])
    for i in range(4):
        np.testing.assert_array_equal(together[i], tokens([i], [7 + i])[0])
    assert together.tolist() != tokens([0, 1, 2, 3], [1, 2, 3, 4]).tolist()


def test_any_settings_share_one_trace(engine):
    before, prompt = loop.decode._cache_size(), engine.prefill(PROMPTS[:2])
    for how in (Sampling(), Sampling(temperature=[0.0, 2.0]), Sampling(top_k=4, min_p=0.1), Sampling(repetition_penalty=1.3)):
        engine.start(prompt, FULL, 8, sampling=how, seed=3).run(8)
    assert loop.decode._cache_size() - before == 1


def test_nothing_random_is_greedy(engine):
    prompt = engine.prefill(PROMPTS)
    greedy = engine.start(prompt, FULL, 20)
    greedy.run(20)
    for how in (Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=1e-6)):
        session = engine.start(prompt, FULL, 20, sampling=how)
        session.run(20)
        assert session.tokens.tolist() == greedy.tokens.tolist()


def test_a_penalty_forgets_what_was_rolled_back(engine):
    """Tokens count as seen while they are in the sequence: prompt, answer and turn; not after a rollback."""
    session = engine.start(engine.prefill(PROMPTS[:1]), FULL, 100, sampling=Sampling(repetition_penalty=1.5))
    seen = lambda: set(np.flatnonzero(np.asarray(session.state.first_BV)[0] < loop.NEVER).tolist())
    assert seen() == set(PROMPTS[0])
    session.run(6)
    assert seen() == set(PROMPTS[0]) | set(session.tokens[0, :6].tolist())
    session.truncate([5])
    assert seen() == set(PROMPTS[0])
    session.extend([[250, 251]])
    assert seen() == {*PROMPTS[0], 250, 251}


def test_streaming_hands_over_every_token(engine):
    prompt, parts = engine.prefill(PROMPTS[:2]), []
    session = engine.start(prompt, FULL, 10)
    session.stream(10, parts.append, every=4)
    assert [p.shape for p in parts] == [(2, 4), (2, 4), (2, 2)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), session.tokens[:, 1:])


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"temperature": -1}, "temperature=-1; allowed: ≥ 0"),
        ({"top_k": 1.5}, "whole numbers"),
        ({"top_p": 0}, "0 < top_p ≤ 1"),
        ({"min_p": [0.1, 0.2, 0.3]}, "one for each of 2 rows"),
        ({"repetition_penalty": 0}, "1 is none"),
    ],
)
def test_wrong_settings_name_the_allowed_ones(engine, settings, message):
    with pytest.raises(ConfigError, match=message):
        engine.start(engine.prefill(PROMPTS[:2]), FULL, 4, sampling=Sampling(**settings))
    with pytest.raises(ConfigError, match="3 seeds for 2 rows"):
        engine.start(engine.prefill(PROMPTS[:2]), FULL, 4, sampling=Sampling(), seed=[1, 2, 3])


def test_keys_are_a_rows_own():
    assert len({tuple(jax.random.key_data(k).tolist()) for k in sampling.keys(0, 8)}) == 8
