"""The loop: batches, positions, stops, room."""

import jax
import numpy as np
import pytest

from kvlab import loop
from kvlab.codec import Int8, Raw
from kvlab.decode import Engine, bucket
from kvlab.errors import CapacityError, ConfigError
from kvlab.layout import Contiguous
from kvlab.loop import fill
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Window
from kvlab.selection import ReadAll
from tests import tools

FULL = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())
window = lambda codec: Policy(Window(60, 4), codec, Contiguous(), ReadAll())
POLICIES = [FULL, window(Int8("channel")), window(Int8())]


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(tiny)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def generate(engine, prompts, policy, n=40, **options):
    session = engine.start(engine.prefill(prompts), policy, n, **options)
    session.run(n)
    return session


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "window int8 channel", "window int8 token"])
def test_a_row_in_a_batch_gives_what_it_gives_alone(engine, policy):
    """CASES 11: prompts of 5, 9 and 130 tokens, padded together, equal each alone."""
    prompts = [ids(5, 1), ids(9, 2), ids(130, 3)]
    together = generate(engine, prompts, policy).tokens
    for row, prompt in zip(together, prompts):
        np.testing.assert_array_equal(row, generate(engine, [prompt], policy).tokens[0])


def test_logits_of_a_padded_row_equal_those_alone(engine):
    prompts = [ids(5, 1), ids(9, 2)]
    together = engine.prefill(prompts).logits_BV
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(together[i], engine.prefill([prompt]).logits_BV[0], atol=1e-5)


def test_positions_are_true_after_eviction(engine):
    """CASES 10: evicted to a window, the next query rotates at its true position: logits equal the masked full cache's."""
    prompt, spec = ids(300, 4), {"window": 124}
    windowed = Policy(Window(124, 0), Raw(), Contiguous(), ReadAll())
    session = engine.start(engine.prefill([prompt]), windowed, 4)
    got = session.run(4, watch=["logits"]).logits
    local = Engine(tools.tiny_model(windows=(spec["window"],) * 2))
    # the same weights with a local window in the model itself, over a full cache filled by the unwindowed prefill
    full = engine.start(engine.prefill([prompt]), FULL, 4)
    full.model = local.model
    want = full.run(4, watch=["logits"]).logits
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_forked_rows_continue_one_prompt(engine):
    prompt, questions = ids(70, 5), [ids(3, 6), ids(7, 7), []]
    forked = generate(engine, [prompt], FULL, 20, rows=[0, 0, 0], forced=questions)
    for row, question in enumerate(questions):
        alone = generate(engine, [prompt + question], FULL, 20 - len(question))
        assert forked.answers()[row] == alone.tokens[0][: 21 - len(question)].tolist()


def test_one_compilation_and_one_prefill_shape():
    """CASES 18: prompts of different lengths in one bucket, and 64 steps, compile once each."""
    engine = Engine(tools.tiny_model(hidden=40))
    before = loop.decode._cache_size(), loop.prefill._cache_size()
    for n in (70, 90, 128):
        session = engine.start(engine.prefill([ids(n)]), FULL, 128 + 64 - n)
        for _ in range(64):
            session.run(1)
    assert (loop.decode._cache_size() - before[0], loop.prefill._cache_size() - before[1]) == (1, 1)
    assert [bucket(n) for n in (1, 64, 65, 2048, 2049)] == [64, 64, 128, 2048, 4096]


def test_a_stop_token_ends_a_row_and_only_that_row(engine):
    prompts = [ids(20, 8), ids(20, 9)]
    free = generate(engine, prompts, FULL, 30).tokens
    stop = int(free[0][5])
    assert stop not in free[0][:5]
    stopped = generate(engine, prompts, FULL, 30, stops=[stop])
    end = free[1].tolist().index(stop) if stop in free[1] else 31
    assert stopped.tokens[0][:6].tolist() == free[0][:6].tolist() and (stopped.tokens[0][6:] == -1).all()
    assert stopped.tokens[1][:end].tolist() == free[1][:end].tolist()
    assert stopped.answers()[0] == free[0][:5].tolist()


def test_overflow_is_refused_before_anything_is_lost(engine):
    """CASES 19: on the host, and the session goes on afterwards."""
    session = generate(engine, [ids(20)], FULL, 10)
    kept = np.asarray(session.state.caches[0].pos)
    with pytest.raises(CapacityError, match="1 more tokens asked for, 0 fit"):
        session.run(1)
    np.testing.assert_array_equal(kept, np.asarray(session.state.caches[0].pos))


def test_an_append_past_the_capacity_changes_nothing():
    """CASES 19, on the device: even without the host's check the last slot is not overwritten."""
    s = tools.sequence(lengths=(64, 64), bucket=64, steps=1)
    cache = fill(FULL, s.record, 64)
    key, value = tools.appended(s)
    after = jax.jit(FULL.append)(cache, key[0], value[0], s.lengths)
    jax.tree.map(np.testing.assert_array_equal, (cache.pos, cache.memory), (after.pos, after.memory))


@pytest.mark.parametrize(
    "prompts,new,message",
    [([[]], 1, "empty"), ([], 1, "empty"), ([[1] * 1025], 1, "at most 1024"), ([[1] * 1000], 30, "exceed the 1024")],
)
def test_prompts_that_do_not_fit(engine, prompts, new, message):
    with pytest.raises(CapacityError, match=message):
        engine.start(engine.prefill(prompts), FULL, new)


def test_wrong_arguments_name_the_right_ones(engine):
    prompt = engine.prefill([[1, 2]])
    with pytest.raises(ConfigError, match="3 policies for a model of 2 layers"):
        engine.start(prompt, [FULL] * 3, 1)
    with pytest.raises(ConfigError, match="allowed: bound, entropy, logits, outputs, reads"):
        engine.start(prompt, FULL, 1).run(1, watch=["mass"])
