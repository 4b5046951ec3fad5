"""What is read: choosing against sorts in numpy, every selection against a naive one, budgets, bytes, rows, configuration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import decode, memory, parts
from kvlab.attention import AttentionSpec
from kvlab.cli import app
from kvlab.codec import Int8, Raw
from kvlab.core import BY_MAXIMUM, BY_SHARE, NO_BOUND, PAGE, Around, Record
from kvlab.decode import Engine
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import SELECTIONS, DoubleSparsity, ReadAll, choose, double_sparsity
from tests import naive, tools

pytestmark = pytest.mark.compiled_quickly

KINDS = [
    (name, kind)
    for name in ("random", "recency", "key_norm", "oracle", "hysparse", "lightning", "double_sparsity", "quest")
    for kind in ("token", "page")
    if (name, kind) != ("quest", "token")
]
STORES = [("keep_all", "raw"), ("key_norm", "raw"), ("keep_all", "int8_channel"), ("window", "int8_channel"), ("window", "raw")]
CASES = [(name, kind, *store) for name, kind in KINDS for store in STORES]
OFTEN = [(*kind, *STORES[i % len(STORES)]) for i, kind in enumerate(KINDS)]
SPEC = AttentionSpec(1.0)


def make(selection, retention="keep_all", codec="raw") -> Policy:
    return Policy(tools.RETENTIONS[retention], tools.CODECS[codec], Contiguous(), selection)


# ------------------------------------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize("sparsity,length,most,want", [
    (0.9, 1000, None, (100, BY_SHARE)), (0.9, 1000, 64, (64, BY_MAXIMUM)), (0.9, 1000, 100, (100, BY_SHARE)),
    (0.0, 77, None, (77, NO_BOUND)), (0.0, 77, 50, (50, BY_MAXIMUM)), (0.99, 5, None, (1, BY_SHARE)), (0.5, 0, 9, (0, NO_BOUND)),
    (0.65, 131_072, None, (45_876, BY_SHARE)),
])  # fmt: skip
def test_count(sparsity, length, most, want):
    assert tuple(map(int, choose.count(jnp.int32(length), sparsity, most))) == want
    assert naive.count(length, sparsity, most) == want[0]


@pytest.mark.parametrize("size", [1, 63, 64, 200])
def test_top_and_numbers_equal_a_sort(rng, size):
    """Ties, both zeros, infinities, slots that are not there, and numbers from none to more than there are."""
    score = rng.choice(np.array([-np.inf, -2.5, -0.0, 0.0, 1e-30, 1.5, np.inf], np.float32), (5, 3, size))
    ok, pos = rng.random(score.shape) < 0.8, rng.permuted(np.broadcast_to(np.arange(size), score.shape), axis=-1)
    number = rng.integers(0, size + 2, (5, 3))
    mask = jax.jit(choose.top)(score, ok, pos.astype(np.int32), number)
    ids = jax.jit(choose.numbers, static_argnums=1)(mask, size)
    for at in np.ndindex(5, 3):
        want = naive.top(score[at], ok[at], pos[at], number[at])
        np.testing.assert_array_equal(mask[at], want)
        np.testing.assert_array_equal(ids[at], np.r_[np.flatnonzero(want), np.full(size - want.sum(), -1)])


@pytest.mark.parametrize("number,want", [
    (0, []), (1, [99]), (3, [0, 1, 99]), (6, [0, 1, 2, 3, 98, 99]), (40, [0, 1, 2, 3, *range(92, 100)]),
])  # fmt: skip
def test_sinks_and_recent_tokens_stay_inside_k(number, want):
    got = choose.forced(jnp.arange(100), jnp.int32(99), jnp.int32(number), 4, 8)
    assert np.flatnonzero(got).tolist() == want or number == 0


# ------------------------------------------------------------------------------------------------ against naive programs


@functools.cache
def read_all(retention, codec):
    return tools.run(make(ReadAll(), retention, codec), tools.sequence())[2]["out"]


def check(name, kind, retention, codec):
    s, selection = tools.sequence(), tools.selection(name, granularity=kind, sparsity=0.7, recent=9)
    policy = make(selection, retention, codec)
    first, last, seen = tools.run(policy, s)
    for step in (0, 1, 45, s.steps - 1):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)
    _check_answer(policy, last, s)
    _check_index(policy, last, s)
    assert memory.resident(first) == memory.resident(last)
    everything = dataclasses.replace(policy, selection=dataclasses.replace(selection, sparsity=0.0))
    np.testing.assert_allclose(tools.run(everything, s)[2]["out"], read_all(retention, codec), atol=1e-5)


def _check_answer(policy, cache, s):
    """No slot or page twice, none without a visible token, padding at the end."""
    visible, query = memory.positions(policy, cache) >= 0, jnp.asarray(s.query[-1])
    around = Around(None, lambda: jnp.einsum("bhqd,bhnpd->bhqnp", query, _stored(cache, s)))
    ids = np.asarray(jax.jit(lambda c, q, v: policy.selection.select(c.index, q, v, c, around).index)(cache, query, visible))
    ok = np.asarray(visible) if policy.selection.granularity == "page" else np.asarray(visible).reshape(*visible.shape[:2], -1, 1)
    for b, h in np.ndindex(ids.shape[:2]):
        real = ids[b, h][ids[b, h] >= 0]
        assert len(real) and len(set(real)) == len(real) and ok[b, h, real].any(-1).all()
        assert (ids[b, h][len(real) :] == -1).all()


def _stored(cache, s):
    """Exact keys of what the slots hold, `[B, H, N, P, D]`; zero where none."""
    pos = np.asarray(cache.pos)
    b, h = (i[..., None, None] for i in np.indices(pos.shape[:2], sparse=True))
    return jnp.asarray(np.where(pos[..., None] >= 0, s.key[b, h, np.maximum(pos, 0)], 0).astype(np.float32))


def _check_index(policy, cache, s):
    """The state after appends is that of a cache filled with the same tokens."""
    if "Quest" in type(policy.selection).__name__ and policy.unit == 1 and policy.retention.evicts:
        return  # its bounds only widen; the oracle follows their history
    selection = policy.selection
    if isinstance(selection, DoubleSparsity):
        selection = dataclasses.replace(selection, chosen=cache.index[0])  # what it picked from the prompt stays
    again = selection.start(_stored(cache, s), cache.pos)
    live = np.asarray(cache.pos >= 0)
    for old, new in zip(jax.tree.leaves(cache.index), jax.tree.leaves(again)):
        if old.ndim == 3 and old.dtype == np.int32:
            np.testing.assert_array_equal(old, new)
            continue
        if old.ndim == 4 and old.shape[-1] == live[0, 0].size:  # gated: channel by channel
            old, new = (np.moveaxis(np.asarray(x), 2, 3).reshape(*live.shape, -1) for x in (old, new))
        where = live if old.shape[:4] == live.shape else live.any(-1)
        widen = lambda x: np.asarray(x).view(np.float16) if x.dtype == np.uint16 else x
        a, b = (np.asarray(widen(x), np.float32)[where] for x in (old, new))
        np.testing.assert_allclose(a, b, atol=1e-3 if old.dtype == np.uint16 else 1e-5)


@pytest.mark.parametrize("case", OFTEN, ids="-".join)
def test_equals_a_naive_program(case):
    """Filled and during 140 appends, ragged: attention over exactly what numpy picks; sparsity 0 reads everything."""
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c not in OFTEN], ids="-".join)
def test_the_whole_product_equals_a_naive_program(case):
    check(*case)


@pytest.mark.parametrize("norm", ["softmax", "tempered"])
def test_scores_normalised_in_windows_pick_what_numpy_picks(norm):
    s = tools.sequence(steps=3)
    policy = make(tools.selection("hysparse", sparsity=0.7, recent=4, window_norm=norm, dtype="int8"))
    seen = tools.run(policy, s)[2]
    np.testing.assert_allclose(seen["out"][2], tools.oracle(policy, s, seen, 2), atol=2e-5)


# -------------------------------------------------------------------------------------------------- budgets and bytes


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def filled(selection, tokens, rows=1, dim=32, key=None):
    draw = lambda seed: normal(seed, rows, 2, tokens, dim)
    policy = make(selection)
    pos = jnp.broadcast_to(jnp.arange(tokens), (rows, tokens))
    cache = jax.jit(policy.fill, static_argnums=1)(Record(draw(0) if key is None else key, draw(1), pos), tokens)
    return policy, cache, jnp.asarray(normal(2, rows, 2, 3, dim))


@jax.jit
def attend(policy, cache, query, now, shared=None):
    return policy.attend(cache, query, now, SPEC, shared)


@pytest.mark.parametrize("name,kind", [("recency", "token"), ("hysparse", "token"), ("hysparse", "page"), ("quest", "page")])
def test_realised_sparsity(name, kind):
    """Within a point of what was asked, at 4,096 tokens and at 4,085; the limit that held is named."""
    policy, cache, query = filled(tools.selection(name, granularity=kind), 4096)
    for sparsity in (0.35, 0.65, 0.9):
        chosen = dataclasses.replace(policy, selection=dataclasses.replace(policy.selection, sparsity=sparsity))
        for length in (4096, 4085):
            info = attend(chosen, cache, query, jnp.full(1, length - 1)).info
            assert np.abs(1 - np.asarray(info.reads_BH) / length - sparsity).max() < 0.01
            assert (np.asarray(info.bound_BH) == BY_SHARE).all()


@pytest.mark.parametrize("kind", ["token", "page"])
def test_a_largest_number(kind):
    policy, cache, query = filled(tools.selection("recency", granularity=kind, max_k=256, sparsity=0.5), 1024)
    for length, bound in ((1024, BY_MAXIMUM), (300, BY_SHARE)):
        info = attend(policy, cache, query, jnp.full(1, length - 1)).info
        assert (np.asarray(info.bound_BH) == bound).all()
        assert np.abs(np.asarray(info.reads_BH) - min(256, length / 2)).max() <= (0 if kind == "token" else PAGE / 2)


def test_index_bytes_are_counted():
    """A cache grows by exactly its index keys: 2·8·4,096 numbers for two heads, in the bytes of each type."""
    plain = memory.resident(filled(ReadAll(), 4096)[1])
    for dtype, size in (("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1)):
        cache = filled(tools.selection("hysparse", dtype=dtype), 4096)[1]
        assert memory.resident(cache) - plain == memory.resident(cache.index) == 2 * 8 * 4096 * size


class Shape:
    layers, kv_heads, head_dim = 2, 2, 32


def test_equal_bytes_to_read(monkeypatch):
    """`read` gives every selection the same bytes, index included, within a page; what an index exceeds is refused."""
    monkeypatch.setattr("kvlab.selection.gated.gates.load", lambda name: gate)
    from kvlab import gates

    gate = gates.make("spatial", gates.GateConfig(2, 2, 32, rank=8))
    per_token, asked = 2 * 32 * 4, 0.3
    for name, kind in (
        ("recency", "token"),
        ("key_norm", "page"),
        ("quest", "page"),
        ("hysparse", "token"),
        ("hysparse", "page"),
    ):
        chosen = SELECTIONS[name](**({"gate": "x"} if name == "hysparse" else {}), granularity=kind, read=asked)
        policy, cache, query = filled(chosen.at(0, Shape, per_token), 4096)
        reads = attend(policy, cache, query, jnp.full(1, 4095)).info.reads_BH
        read = np.asarray(reads) * per_token + 4096 * policy.selection.index_bytes(32)
        assert np.abs(read - asked * 4096 * per_token).max() <= PAGE * per_token, name
    with pytest.raises(ConfigError, match="index keys alone take 0.062"):
        SELECTIONS["hysparse"](gate="x", read=0.05).at(0, Shape, per_token)


# ------------------------------------------------------------------------------------------------------------- rows


def test_sparsities_per_row():
    """Three at once, in one trace with others, are three batches of one; a list of another length is refused."""
    traces = 0

    @jax.jit
    def run(policy, cache, query, now):
        nonlocal traces
        traces += 1
        return policy.attend(cache, query, now, SPEC)

    policy, cache, query = filled(tools.selection("hysparse", sparsity=[0.2, 0.5, 0.9], recent=4), 192, rows=3)
    for given in ([0.2, 0.5, 0.9], [0.9, 0.3, 0.1]):
        chosen = dataclasses.replace(policy, selection=dataclasses.replace(policy.selection, sparsity=given))
        together = run(chosen, cache, query, jnp.full(3, 191))
        for row, sparsity in enumerate(given):
            alone = dataclasses.replace(policy, selection=dataclasses.replace(policy.selection, sparsity=sparsity))
            single = attend(alone, tools.rows(policy, cache, np.array([row])), query[row : row + 1], jnp.full(1, 191))
            np.testing.assert_allclose(together.out_BHQD[row], single.out_BHQD[0], atol=1e-6)
            assert (np.asarray(together.info.reads_BH[row]) == naive.count(192, sparsity)).all()
    assert traces == 1
    with pytest.raises(ConfigError, match="3 sparsities for 1 rows"):
        attend(policy, tools.rows(policy, cache, np.array([0])), query[:1], jnp.full(1, 191))


def test_a_session_watches_reads_and_bounds_and_reorders_its_rows(tiny):
    rng, engine = np.random.default_rng(0), Engine(tiny)
    prompts = [rng.integers(0, 256, 100).tolist() for _ in range(3)]
    policy = make(tools.selection("recency", sparsity=[0.25, 0.5, 0.75], max_k=60))
    session = engine.start(engine.prefill(prompts), policy, 8)
    steps = session.rows([2, 0, 2]).run(1, watch=["reads", "bound"])
    reads, bound = (np.asarray(x)[0] for x in (steps.reads, steps.bound))
    length, axes = 101, tuple(i for i, n in enumerate(reads.shape) if n != 3)
    want = [naive.count(length, x, 60) for x in (0.75, 0.25, 0.75)]
    assert reads.mean(axes).tolist() == want and reads.std(axes).max() == 0
    assert bound.mean(axes).tolist() == [BY_SHARE, BY_MAXIMUM, BY_SHARE]


@pytest.mark.parametrize("name,kind", KINDS)
def test_short_and_empty_rows(name, kind):
    """Fewer tokens than K, and a row that sees none: output 0, log-sum-exp −inf, gradients without NaN."""
    selection = tools.selection(name, granularity=kind, sparsity=0.1)
    policy, cache, query = filled(selection, 128, rows=2, key=jnp.zeros((2, 2, 128, 32)))
    cache = dataclasses.replace(cache, pos=cache.pos.at[1].set(-1))
    now = jnp.array([2, 5])
    done = attend(policy, cache, query, now)
    assert (np.asarray(done.info.reads_BH) == [[3, 3], [0, 0]]).all()
    assert (np.asarray(done.out_BHQD[1]) == 0).all() and np.isneginf(np.asarray(done.lse_BHQ[1])).all()
    assert np.isfinite(np.asarray(done.out_BHQD)).all()


# ------------------------------------------------------------------------------------------- one layer leads the others


def test_followers_read_where_their_leader_attends_most():
    leader = SELECTIONS["oracle_share"](sparsity=0.7, recent=4, every=2)
    policy, cache, query = filled(leader.at(0, Shape, 256), 640)
    led = attend(policy, cache, query, jnp.full(1, 639))
    assert (np.asarray(led.info.reads_BH) == 640).all()
    key = np.asarray(tools.codes(policy, cache, 10)["k"]["x"]).reshape(2, 640, 32)
    follower = dataclasses.replace(policy, selection=leader.at(1, Shape, 256))
    done = attend(follower, cache, -query, jnp.full(1, 639), led.shared)
    for h in range(2):
        mass = naive.softmax(np.asarray(query[0, h]) @ key[h].T).mean(0).reshape(10, PAGE).sum(-1)
        pos = np.arange(640).reshape(10, PAGE)
        want = naive.pages(leader, mass, pos >= 0, pos, naive.count(640, 0.7))
        shared = np.asarray(led.shared[0, h])
        assert shared[shared >= 0].tolist() == np.flatnonzero(want).tolist()
        assert int(done.info.reads_BH[0, h]) == want.sum() * PAGE
    with pytest.raises(ConfigError, match="no layer before this one"):
        attend(follower, cache, query, jnp.full(1, 639))
    with pytest.raises(RefusedPolicy, match="moves tokens to other slots"):
        make(leader, "window")


def test_a_threshold_reads_exactly_what_lies_above():
    layer = tools.gate_layer(threshold=True)
    policy, cache, query = filled(tools.selection("hysparse", layer, mode="threshold", dtype="float32", recent=5), 200)
    key = normal(0, 1, 2, 200, 32)
    out = attend(policy, cache, query, jnp.full(1, 199))
    for h in range(2):
        above = naive.spatial(layer, np.asarray(query[0, h]), key[0, h], h) > np.asarray(layer.threshold_H)[h]
        assert 20 < above.sum() < 180
        forced = np.isin(np.arange(200), [0, 1, 2, 3, *range(195, 200)])
        assert int(out.info.reads_BH[0, h]) == (above | forced).sum()


# ------------------------------------------------------------------------------------- a share of attention, few channels


@pytest.mark.parametrize("size", [1, 64, 200])
def test_cover_is_a_running_sum_over_a_sort(rng, size):
    """Ties, zeros and denormals among the weights; nothing to cover, and more than there is."""
    weight = rng.choice(np.array([0, 1e-40, 1e-3, 0.1, 0.5], np.float32), (4, 3, size)) * rng.choice([1.0, 0.7], (4, 3, size))
    weight = weight.astype(np.float32)
    for mass in (-0.5, 0.0, 1e-3, 0.35, 2.05, 1e6):
        got = jax.jit(choose.cover)(weight, jnp.full((4, 3), mass, jnp.float32))
        for at in np.ndindex(4, 3):
            if mass == 1e6:
                normal = weight[at] >= np.finfo(np.float32).tiny  # XLA's sums take denormals for zeros
                assert normal.sum() <= int(got[at]) <= (weight[at] > 0).sum()
            else:
                assert int(got[at]) == naive.few(weight[at], mass), (mass, at)


@pytest.mark.parametrize("store", STORES, ids="-".join)
@pytest.mark.parametrize("p,most", [(0.6, None), (0.95, 40)])
def test_top_p_equals_a_naive_program(p, most, store):
    s, selection = tools.sequence(), SELECTIONS["top_p"](p=p, max_k=most, recent=9)
    policy = make(selection, *store)
    _, last, seen = tools.run(policy, s)
    for step in (0, 45, s.steps - 1):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)
    everything = dataclasses.replace(policy, selection=SELECTIONS["top_p"](p=1.0))
    np.testing.assert_allclose(tools.run(everything, s)[2]["out"], read_all(*store), atol=1e-5)


def test_top_p_reads_the_fewest_that_cover_it():
    """The share is covered and would not be without the least of what is read; each row has its own share, in one trace."""
    shares, traces = [0.2, 0.7, 0.99], 0

    @jax.jit
    def run(policy, cache, query, now):
        nonlocal traces
        traces += 1
        visible = memory.positions(policy, cache) >= 0
        logits = lambda: jnp.einsum("bhqd,bhnpd->bhqnp", query, policy.layout.slice(cache.memory, 0, 5)["k"]["x"])
        picked = policy.selection.select((), query, visible, cache, Around(None, logits))
        return picked, policy.attend(cache, query, now, SPEC), logits()

    policy, cache, query = filled(SELECTIONS["top_p"](p=shares, sinks=2, recent=3), 300, rows=3)
    for given in (shares, shares[::-1]):
        chosen = dataclasses.replace(policy, selection=dataclasses.replace(policy.selection, p=jnp.asarray(given)))
        picked, done, logits = run(chosen, cache, query, jnp.full(3, 299))
        for b, h in np.ndindex(3, 2):
            ids = np.asarray(picked.index[b, h])
            real = ids[ids >= 0]
            assert (ids[len(real) :] == -1).all() and {0, 1, 297, 298, 299} <= set(real)
            weight = naive.softmax(np.asarray(logits[b, h], np.float64).reshape(3, -1)[:, :300]).mean(0)
            free = np.setdiff1d(real, [0, 1, 297, 298, 299])
            assert weight[real].sum() >= given[b] - 1e-5
            assert not len(free) or weight[real].sum() - weight[free].min() < given[b]
            assert int(done.info.reads_BH[b, h]) == len(real) and int(done.info.bound_BH[b, h]) == BY_SHARE
        alone = dataclasses.replace(chosen, selection=chosen.selection.rows(np.array([1])))
        single = attend(alone, tools.rows(policy, cache, np.array([1])), query[1:2], jnp.full(1, 299))
        np.testing.assert_allclose(done.out_BHQD[1], single.out_BHQD[0], atol=1e-6)
    assert traces == 1
    with pytest.raises(ConfigError, match="3 shares for 1 rows"):
        attend(policy, tools.rows(policy, cache, np.array([0])), query[:1], jnp.full(1, 299))


@pytest.mark.parametrize("p,most,reads,bound", [(1.0, None, 300, NO_BOUND), (1.0, 20, 20, BY_MAXIMUM), (0.9, 3, 3, BY_MAXIMUM)])
def test_top_p_says_what_held_it(p, most, reads, bound):
    policy, cache, query = filled(SELECTIONS["top_p"](p=p, max_k=most), 300)
    info = attend(policy, cache, query, jnp.full(1, 299)).info
    assert (np.asarray(info.reads_BH) == reads).all() and (np.asarray(info.bound_BH) == bound).all()


def test_top_p_of_short_and_empty_rows():
    policy, cache, query = filled(SELECTIONS["top_p"](p=0.5, sinks=1, recent=1), 128, rows=2, key=jnp.zeros((2, 2, 128, 32)))
    cache = dataclasses.replace(cache, pos=cache.pos.at[1].set(-1))
    done = attend(policy, cache, query, jnp.array([9, 5]))
    assert (np.asarray(done.info.reads_BH) == [[5, 5], [0, 0]]).all()  # of ten equal tokens, half of the attention
    assert (np.asarray(done.out_BHQD[1]) == 0).all() and np.isfinite(np.asarray(done.out_BHQD)).all()


def test_few_channels_are_those_of_the_prompt_and_stay():
    """The heaviest of each row and head; appended tokens do not change them; 16 bits of each, and the ids, are what they cost."""
    key = normal(0, 2, 2, 192, 32)
    heavy = np.array([[[3, 8, 21], [0, 1, 31]], [[5, 6, 7], [9, 19, 29]]])
    for b, h in np.ndindex(2, 2):
        key[b, h][:, heavy[b, h]] *= 5
    policy, cache, query = filled(SELECTIONS["double_sparsity"](channels=3, sparsity=0.9), 192, rows=2, key=key)
    np.testing.assert_array_equal(cache.index[0], heavy)
    _, plain, _ = filled(ReadAll(), 192, rows=2, key=key)
    ids = heavy.size * 4
    assert memory.resident(cache) - memory.resident(plain) == ids + 2 * 2 * 192 * policy.selection.index_bytes(32)
    cache = tools.truncate(policy, cache, jnp.full(2, 128))
    after = jax.jit(policy.append)(cache, jnp.ones((2, 2, 32)) * 99, jnp.ones((2, 2, 32)), jnp.full(2, 128))
    np.testing.assert_array_equal(after.index[0], heavy)


def test_few_channels_from_a_calibration(tiny, tmp_path):
    """What `calibrate` finds is a naive product of means; a policy that names the file uses it, streams, and is named by it."""
    engine, rng, path = Engine(tiny), np.random.default_rng(0), tmp_path / "channels.json"
    prompt = engine.prefill([rng.integers(0, 256, n).tolist() for n in (90, 70)], {"queries"})
    found = double_sparsity.calibrate(prompt.records, 4)
    double_sparsity.save(found, path)
    for layer, record in enumerate(prompt.records):
        for h in range(2):
            key = np.concatenate([np.abs(record.key_BHTD[b, h, :n]) for b, n in ((0, 90), (1, 70))]).mean(0)
            query = np.abs(np.asarray(record.seen["queries"])[:, h]).mean((0, 1, 2))
            assert found[layer][h] == np.sort(np.argsort(-key * query)[:4]).tolist()
    table = {"selection": {"name": "double_sparsity", "channels": 4, "calibration": str(path), "sparsity": 0.5}}
    session = engine.stream([list(range(100))], parts.policy(table), 4)
    assert session.run(2) is not None
    for layer, cache in enumerate(session.state.caches):
        np.testing.assert_array_equal(cache.index[0][0], found[layer])
    with pytest.raises(ConfigError, match="learns from the whole prompt; calibrate"):
        engine.stream([list(range(100))], parts.policy({"selection": {"name": "double_sparsity"}}), 4)
    with pytest.raises(ConfigError, match="does not name 5 channels of 16 for 2 layers of 2 KV heads"):
        parts.policy({"selection": {**table["selection"], "channels": 5}}).at(0, tiny.config)
    from kvlab.experiment import config

    assert config.Cell({}, {}, table).files() == {path}


# ------------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("table,words", [
    ({"name": "recency", "sparsty": 0.5}, "no option 'sparsty'"),
    ({"name": "recency", "sparsity": 1.0}, "sparsity=1.0"),
    ({"name": "recency", "sparsity": [0.5, 1.2]}, "1.2"),
    ({"name": "recency", "granularity": "pages"}, "granularity='pages'"),
    ({"name": "recency", "max_k": 0}, "max_k=0"),
    ({"name": "quest", "granularity": "token"}, "bounds pages"),
    ({"name": "oracle_share", "every": 0}, "every=0"),
    ({"name": "top_p", "p": 0.0}, "p=0.0; allowed: above 0"),
    ({"name": "top_p", "p": [0.5, 1.2]}, "1.2"),
    ({"name": "top_p", "max_k": 0}, "top_p: max_k=0"),
    ({"name": "double_sparsity", "channels": 0}, "channels=0"),
    ({"name": "hysparse", "dtype": "int4"}, "dtype='int4'"),
    ({"name": "hysparse", "mode": "threshold", "granularity": "page"}, 'granularity = "token"'),
    ({"name": "hysparce"}, "hysparse"),
])  # fmt: skip
def test_wrong_tables(table, words):
    with pytest.raises(ConfigError, match=words):
        parts.policy({"selection": table})


def test_tables_reach_plan_and_layers(tiny, tmp_path, capsys):
    from typer.testing import CliRunner

    from kvlab import gates
    from kvlab.experiment import config

    ran = CliRunner().invoke(
        app, ["plan", "--model", "tiny-recall", "--policy", "selection=quest", "--policy", "selection.sparsity=0.8"]
    )
    assert ran.exit_code == 0, ran.output
    path = tmp_path / "gate.safetensors"
    gates.save(gates.make("spatial", gates.GateConfig(2, 2, 16, rank=4)), path)
    file = tmp_path / "policy.toml"
    file.write_text(f'layers = [{{range = [1, 1], policy = {{selection = {{name = "hysparse", gate = "{path}"}}}}}}]\n[policy]\n')
    _, policies = config.read_policies([str(file)], None, tiny.config)
    bound = decode.per_layer(policies, tiny.config)
    assert isinstance(bound[0].selection, ReadAll) and bound[1].selection.layer is not None
    with pytest.raises(ConfigError, match="gate for 2 layers"):
        bound[1].selection._load().at(0, Shape)


def test_int8_and_raw_do_not_change_what_is_scored():
    """Index keys come from exact keys: a codec changes what is read out, never what is picked."""
    raw, coded = (Policy(KeepAll(), c, Contiguous(), tools.selection("hysparse")) for c in (Raw(), Int8()))
    s = tools.sequence(steps=1)
    a, b = (p.fill(s.record, 192).index for p in (raw, coded))
    np.testing.assert_array_equal(a, b)
