"""The rest of a cache's life: chunks, second turns, rollback, forks and reordering, streamed prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import loop, memory
from kvlab.attention import AttentionSpec
from kvlab.codec import Int8, Raw
from kvlab.decode import Engine
from kvlab.errors import CapacityError, ConfigError
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Window
from kvlab.selection import ReadAll
from kvlab.session import CHUNK
from tests import tools

pytestmark = pytest.mark.compiled_quickly

make = lambda retention, codec: Policy(retention, codec, Contiguous(), ReadAll())
FULL = make(KeepAll(), Raw())
POLICIES = {
    "full": FULL,
    "window": make(Window(60, 4), Raw()),
    "window int8": make(Window(60, 4), Int8()),
    "window int8 pages": make(Window(60, 4), Int8("channel")),
    "int8 pages": make(KeepAll(), Int8("channel")),
}


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(tiny)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def started(engine, prompts, policy, new=256, **options):
    return engine.start(engine.prefill(prompts), policy, new, **options)


def next_logits(session):
    return np.asarray(session.run(1, watch=["logits"]).logits[0])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_turn_in_chunks_gives_what_its_tokens_give_one_by_one(engine, policy):
    """Ragged prompts and turns, across pages and evictions; coded pages differ by what the codec rounds."""
    prompts, turns = [ids(70, 1), ids(20, 2)], [ids(90, 3), ids(150, 4)]
    chunked = started(engine, prompts, policy)
    for _ in range(3):
        next_logits(chunked)
    answers = chunked.tokens[:, :3].tolist()
    chunked.extend(turns)
    assert chunked.lengths.tolist() == [163, 173]
    pending = [[int(token)] for token in chunked.pending]
    fed = started(engine, prompts, policy, forced=[a + t + p for a, t, p in zip(answers, turns, pending)])
    seen = [next_logits(fed) for _ in range(154)]
    want = [seen[93][0], seen[153][1]]
    np.testing.assert_allclose(next_logits(chunked), want, atol=2e-4 if isinstance(policy.codec, Raw) else 0.2)


def test_logits_of_a_turn_are_those_of_each_token(engine):
    """Ragged turns over more than one chunk, beside the tokens fed one by one; pads have none."""
    prompts, turns = [ids(70, 1), ids(20, 2)], [ids(300, 3), ids(7, 4)]
    logits = started(engine, prompts, FULL, 512).predict(turns)
    fed = started(engine, prompts, FULL, 512, forced=turns)
    want = np.asarray(fed.run(300, watch=["logits"]).logits).swapaxes(0, 1)
    np.testing.assert_allclose(logits[0], want[0], atol=2e-4)
    np.testing.assert_allclose(logits[1, :7], want[1, :7], atol=2e-4)
    assert not logits[1, 7:].any()


def test_a_second_turn_equals_a_fresh_prompt(engine):
    prompts, turns = [ids(70, 1), ids(20, 2)], [ids(90, 3), ids(33, 4)]
    session = started(engine, prompts, FULL)
    session.extend(turns)
    fresh = started(engine, [p + t for p, t in zip(prompts, turns)], FULL)
    assert session.tokens[:, -1].tolist() == fresh.tokens[:, 0].tolist()
    np.testing.assert_allclose(next_logits(session), next_logits(fresh), atol=1e-4)


@pytest.mark.parametrize("policy", [POLICIES["window"], POLICIES["window int8 pages"]], ids=["tokens", "pages"])
def test_the_budget_holds_after_a_second_turn(engine, policy):
    """CASES 9: what a turn adds is compressed too, and it is the window of the last tokens that stays."""
    session = started(engine, [ids(200, 1)], policy)
    budget = session.state.caches[0].budget
    session.extend([ids(130, 2)])
    for cache in session.state.caches:
        pos = np.asarray(cache.pos)
        assert ((pos >= 0).sum((-1, -2)) <= budget).all()
        visible = np.asarray(memory.positions(policy, cache))[0, 0]
        assert sorted(visible[visible >= 0].tolist()) == [0, 1, 2, 3, *range(270, 330)]


@pytest.mark.parametrize("name", ["full", "int8 pages"])
def test_after_a_rollback_a_cache_is_a_fresh_one(engine, name):
    """CASES 15: answer, roll back to the prompt, ask again: as if the first question had never come."""
    prompt, question = [ids(100, 1)], [ids(40, 2)]
    session = started(engine, prompt, POLICIES[name])
    session.run(90)  # fills and commits the page that the prompt ends in
    session.truncate([100])
    session.extend(question)
    fresh = started(engine, prompt, POLICIES[name])
    fresh.extend(question)
    np.testing.assert_allclose(next_logits(session), next_logits(fresh), atol=1e-4 if name == "full" else 0.1)
    kept = lambda s: sorted(p for p in np.asarray(s.state.caches[0].pos)[0, 0].ravel().tolist() if p >= 0)
    assert kept(session) == kept(fresh) == list(range(141))


@pytest.mark.parametrize("name", ["full", "int8 pages"])
def test_a_rollback_inside_the_open_page_changes_nothing_before_it(engine, name):
    session = started(engine, [ids(70, 1), ids(90, 2)], POLICIES[name])
    whole = started(engine, [ids(70, 1), ids(90, 2)], POLICIES[name])
    session.extend([ids(20, 3), ids(9, 4)])
    session.truncate([75, 92])
    session.extend([ids(4, 5), ids(8, 6)])
    whole.extend([ids(20, 3)[:5] + ids(4, 5), ids(9, 4)[:2] + ids(8, 6)])
    np.testing.assert_allclose(next_logits(session), next_logits(whole), atol=1e-4)


def test_what_was_evicted_does_not_come_back(engine):
    session = started(engine, [ids(200, 1)], POLICIES["window"])
    session.run(5)
    with pytest.raises(CapacityError, match="row 0 cannot be cut back to 202 tokens: layer 0 dropped.*number 204"):
        session.truncate([202])
    with pytest.raises(ConfigError, match="allowed: for each row from 1 to"):
        session.truncate([300])
    session.run(1)


def test_a_row_cut_back_must_be_fed_before_it_runs(engine):
    session = started(engine, [ids(70, 1)], FULL)
    session.run(4)
    session.truncate([72])
    with pytest.raises(ConfigError, match="extend them"):
        session.run(1)
    assert session.pending.tolist() == [-1]


def test_room_counts_slots_lost_to_a_cut_page(engine):
    """A committed page that is cut keeps its place, so there is less room than before; it is never overrun."""
    session = started(engine, [ids(60, 1)], POLICIES["int8 pages"], new=132)
    session.run(70)
    session.truncate([10])
    assert session.room == 192 - 64 and session.limits.tolist() == [138]
    session.extend([ids(128, 2)])
    with pytest.raises(CapacityError, match="1 more tokens asked for, 0 fit"):
        session.run(1)


def test_room_is_each_rows_own(engine):
    """Rows of very different lengths: what one row lost is not taken from another, and a fork has its own."""
    session = started(engine, [ids(300, 1), ids(10, 2)], POLICIES["int8 pages"], new=20)
    session.run(5)
    session.truncate([303, 12])
    assert session.limits.tolist() == [320, 320] and session.room == 17
    session.extend([[1], ids(200, 3)])
    session.truncate([200, 12])  # both end in pages that were committed, whose places stay taken
    assert session.limits.tolist() == [200 + 64, 12 + 4 * 64] and session.rows([1]).room == 256
    session.extend([ids(60, 4), [1]])


def test_a_stream_may_be_followed_by_forced_tokens(engine):
    streamed = engine.stream([ids(90, 1)], FULL, 20, forced=[ids(5, 2)])
    streamed.run(12)
    assert streamed.answers() == forced_after(engine, 12).answers()


def forced_after(engine, steps):
    session = started(engine, [ids(90, 1)], FULL, 20, forced=[ids(5, 2)])
    session.run(steps)
    return session


def test_forced_tokens_come_before_turns_and_rollbacks(engine):
    session = forced_after(engine, 3)
    for change in (lambda: session.truncate([91]), lambda: session.rows([0], [1]), lambda: session.extend([[1]])):
        with pytest.raises(ConfigError, match="forced tokens are waiting"):
            change()
    session.run(2)
    session.extend([[1]])
    stopped = started(engine, [ids(20, 1), ids(20, 2)], FULL, 40, forced=[ids(1, 3), ids(9, 4)], stops=range(256))
    stopped.run(12)
    stopped.extend([[1], [2]])  # a row that stopped early fed fewer than another row was forced to


def test_rows_take_the_tokens_they_are_given(engine):
    session = started(engine, [ids(20, 1), ids(30, 2)], FULL, 20, stops=range(256))
    assert session.done
    other = session.rows([1, 0], [7, 8])
    assert not other.done and other.pending.tolist() == [7, 8]
    fresh = started(engine, [ids(30, 2) + [7], ids(20, 1) + [8]], FULL, 20)
    np.testing.assert_allclose(
        next_logits(other), np.asarray(engine.prefill([ids(30, 2) + [7], ids(20, 1) + [8]]).logits_BV), atol=1e-4
    )
    assert other.tokens[:, -1].tolist() == fresh.tokens[:, 0].tolist()
    for wrong in ([1], [1, -1], [1, 256]):
        with pytest.raises(ConfigError, match="one for each of 2 rows, from 0 to 255"):
            session.rows([0, 1], wrong)


def test_reordered_rows_equal_fresh_ones(engine):
    prompts = [ids(70, 1), ids(20, 2), ids(130, 3)]
    session = started(engine, prompts, POLICIES["window int8 pages"])
    session.run(10)
    other = session.rows([2, 0, 2])
    other.run(20)
    session.run(20)
    assert other.tokens.tolist() == session.tokens[[2, 0, 2]].tolist()
    with pytest.raises(ConfigError, match="allowed: one or more of 0 … 2"):
        session.rows([3])


@pytest.mark.parametrize("name", ["full", "window"])
def test_a_streamed_prompt(engine, name):
    """Through the caches in chunks: exact where nothing is dropped; under a window, what feeding token by token gives."""
    prompts = [ids(700, 1), ids(530, 2)]
    streamed = engine.stream(prompts, POLICIES[name], 16)
    assert streamed.mode == "streamed"
    if name == "full":
        other = started(engine, prompts, FULL, 16)
    else:
        other = engine.start(engine.prefill([p[:1] for p in prompts]), POLICIES[name], 720, forced=[p[1:] for p in prompts])
        other.run(529)
        np.testing.assert_allclose(
            other.state.caches[1].memory["v"]["x"][1], streamed.state.caches[1].memory["v"]["x"][1], atol=1e-4
        )
        return
    np.testing.assert_allclose(next_logits(streamed), next_logits(other), atol=2e-4)


def test_turns_that_do_not_fit_are_refused_before_anything_is_lost(engine):
    session = started(engine, [ids(20)], FULL, 10)
    with pytest.raises(CapacityError, match="makes 31 tokens in row 0, which holds 30"):
        session.extend([ids(11)])
    with pytest.raises(ConfigError, match="a turn for each of 1 rows"):
        session.extend([[1], [2]])
    forced = started(engine, [ids(20)], FULL, 10, forced=[ids(3)])
    with pytest.raises(ConfigError, match="forced tokens are waiting"):
        forced.extend([[1]])
    session.extend([ids(10)])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_a_chunk_copies_no_cache(name, batch):
    """Donated, read and then written in one program: no copy of a large leaf, temporaries of a chunk's size, at 32k."""
    policy, f = POLICIES[name], jax.ShapeDtypeStruct
    if isinstance(policy.retention, Window):
        policy = make(Window(32_000, 4), policy.codec)
    spec = AttentionSpec(0.125)
    record = jax.eval_shape(lambda: tools.sequence(lengths=(64,) * batch, bucket=64, steps=1, H=3, D=64).record)
    cache = jax.eval_shape(lambda r: policy.fill(r, policy.budget(64, 32_768)), record)
    step = jax.jit(lambda p, c, q, k, t: p.extend(c, q, k, k, t, spec), donate_argnums=1)
    shapes = f((batch, 128, 3, 3, 64), "f4"), f((batch, 3, 128, 64), "f4"), f((batch, 128), "i4")
    program = step.lower(policy, cache, *shapes).compile()
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.compiled(program).temporaries < total / 2
    kinds = {"float32": "f32", "int8": "s8"}
    for leaf in (x for x in jax.tree.leaves(cache.memory) if x.size > 100_000):
        assert f"{kinds[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]" + "{3,2,1,0} copy(" not in program.as_text()


def test_streaming_needs_little_beside_weights_and_cache():
    """At 7.5k tokens, XLA's own account: beyond weights and cache, at most a quarter of what a record needs there."""
    model = tools.tiny_model(layers=6, hidden=128, ffn=384, heads=4, kv_heads=2, head_dim=32, context=8192)
    policies = (make(Window(508, 4), Raw()),) * 6
    f = jax.ShapeDtypeStruct
    record = loop.prefill.lower(model.config, model.params, f((1, 8192), "i4"), f((1,), "i4")).compile()
    empty = tools.sequence(lengths=(1,), bucket=64, steps=1, H=2, D=32).record
    caches = tuple(jax.eval_shape(lambda r, p=p: p.fill(r, p.budget(7500, 7500)), empty) for p in policies)
    one = f((1,), "i4")
    chunk = loop.extend.lower(model.config, model.params, policies, caches, f((1, CHUNK), "i4"), one, one).compile()
    a, b = memory.compiled(record), memory.compiled(chunk)
    needs = lambda m: m.temporaries + m.outputs - m.aliased
    assert needs(b) <= 0.25 * needs(a), (needs(b), needs(a))


def test_three_traces_for_turns_of_any_length_up_to_half_a_chunk(engine):
    before = loop.extend._cache_size()
    session = started(engine, [ids(10, 1)], FULL, 700)
    for n in (3, 16, 17, 60, 64, 100, 128):
        session.extend([ids(n, n)])
    assert loop.extend._cache_size() - before == 3
    assert jnp.asarray(session.lengths).tolist() == [398]
