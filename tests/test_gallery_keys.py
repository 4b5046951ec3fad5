"""Retentions that go by keys and values: each against loops in numpy, filled and through evictions, over ragged rows."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from kvlab import cli, loop, models
from kvlab.codec import Raw
from kvlab.core import PAGE, Record
from kvlab.decode import Engine, needs
from kvlab.errors import ConfigError
from kvlab.experiment import environment
from kvlab.experiment.config import Cell
from kvlab.layout import Contiguous, PageMajor
from kvlab.loop import fill
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import (
    RETENTIONS,
    ChunkKV,
    CriticalKV,
    ExpectedAttention,
    HeadBudgets,
    KeepAll,
    KeyDiff,
    KeyNorm,
    LagKV,
    Protect,
    QFilters,
    Random,
    Window,
)
from kvlab.selection import ReadAll
from kvlab.train import calibrate
from tests import tools

pytestmark = pytest.mark.compiled_quickly

H, G, D, FUTURE = 2, 2, 16, 8
FREQUENCY = 0.5 ** np.arange(D // 2, dtype=np.float32)
RNG = np.random.default_rng(3)
DIRECTION = RNG.standard_normal((H, D), np.float32)
MEAN = RNG.standard_normal((2, H, G, D), np.float32)
ROOT = RNG.standard_normal((2, H, G, D, D), np.float32) / 4
COV = ROOT @ np.swapaxes(ROOT, -1, -2)
SHAPE = ModelConfig(layers=1, hidden=64, ffn=64, heads=H * G, kv_heads=H, head_dim=D, vocab=64, context=300)


def kept(pos):
    return set(pos[pos >= 0].tolist())


@pytest.fixture(scope="module")
def s():
    """A sequence whose prompts' records hold what the rules need; pads are poison there too."""
    made = tools.sequence(lengths=(150, 97), bucket=192, steps=80, H=H, G=G, D=D)
    norm = np.where(np.asarray(made.record.pos_BT)[:, None] < 0, 1e4, norms(made)[:, :, :192]).astype(np.float32)
    seen = {"query_mean": jnp.asarray(MEAN), "query_cov": jnp.asarray(COV), "output_norm": jnp.asarray(norm)}
    return dataclasses.replace(made, record=dataclasses.replace(made.record, seen=seen))


def norms(s):
    """‖W_o v‖₁ by position, for some W_o."""
    return np.abs(s.value @ np.random.default_rng(5).standard_normal((D, 9))).sum(-1)


# ------------------------------------------------------------------- naive rules: priorities of stored positions, per head


def by_norm(s, b, h, held):
    return [-np.linalg.norm(s.key[b, h, p]) for p in held]


def by_difference(s, b, h, held):
    mean = sum(s.key[b, h, p] / np.linalg.norm(s.key[b, h, p]) for p in held) / len(held)
    return [-(s.key[b, h, p] @ mean) / np.linalg.norm(s.key[b, h, p]) / np.linalg.norm(mean) for p in held]


def by_lag(s, b, h, held, sinks=2, lag=10):
    found = [np.inf] * sinks + [1.0] * (len(held) - sinks)
    for start in range(sinks, len(held) - 2 * lag + 1, lag):
        total = np.zeros(lag)
        for x in (s.key[b, h].astype(np.float64), s.value[b, h].astype(np.float64)):
            after = x[held[start + lag : start + 2 * lag]]
            low, high = after.min(0), after.max(0)
            spread = np.exp([((x[p] - low) / (high - low)).std(ddof=1) for p in held[start : start + lag]])
            total += spread / spread.sum()
        for rank, i in enumerate(np.argsort(total)):
            found[start + i] = rank / lag
    return found


def by_filter(s, b, h, held):
    return [-(s.key[b, h, p] @ DIRECTION[h]) for p in held]


def by_expectation(s, b, h, held, sinks=4):
    turn = np.zeros((D, D))
    for ahead in range(1, FUTURE + 1):
        for i, angle in enumerate((max(held) + ahead) * FREQUENCY.astype(np.float64)):
            j = i + D // 2
            turn[i, i] += np.cos(angle) / FUTURE
            turn[j, j] += np.cos(angle) / FUTURE
            turn[i, j] -= np.sin(angle) / FUTURE
            turn[j, i] += np.sin(angle) / FUTURE
    late, weight = [p for p in held if p >= sinks], 0.0
    for g in range(G):
        mean, cov = turn @ MEAN[b, h, g], turn @ COV[b, h, g] @ turn.T
        logits = [s.key[b, h, p] @ mean / D**0.5 + s.key[b, h, p] @ cov @ s.key[b, h, p] / D / 2 for p in late]
        weight = weight + np.exp(logits) / np.exp(logits).sum() / G
    score = dict(zip(late, weight))
    return [np.inf if p < sinks else score[p] * np.linalg.norm(s.value[b, h, p]) for p in held]


def by_output(s, b, h, held, budget=48):
    own, norm = by_norm(s, b, h, held), norms(s)[b, h]
    first = sorted(range(len(held)), key=lambda i: own[i])[-(budget // 2) :]
    return [1e30 if i in first else (own[i] + 1e-4) * norm[p] for i, p in enumerate(held)]


def by_hash(s, b, h, held, seed=7):
    def mixed(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x ^ (x >> 16)

    return [mixed((p + mixed(h * 257 + seed)) % 2**32) >> 8 for p in held]


def by_chunk(s, b, held, length=7):
    """Of all heads at once."""
    chunks = {}
    for h in range(H):
        for p, x in zip(held[h], by_norm(s, b, h, held[h])):
            chunks.setdefault(p // length, []).append(x)
    return [[float(np.mean(chunks[p // length])) for p in each] for each in held]


def alone(rule):
    return lambda s, b, held: [rule(s, b, h, held[h]) for h in range(H)]


RULES = {
    "key_norm": (KeyNorm(size=48, unit=1), alone(by_norm)),
    "keydiff": (KeyDiff(size=96, unit=1), alone(by_difference)),
    "lagkv": (LagKV(size=128, sinks=2, lag=10), alone(by_lag)),
    "chunkkv": (ChunkKV(KeyNorm(size=50, unit=1), 7).at(0, SHAPE), by_chunk),
    "q_filters": (QFilters(size=48, unit=1, direction=jnp.asarray(DIRECTION)), alone(by_filter)),
    "expected_attention": (
        ExpectedAttention(size=128, future=FUTURE, frequency=jnp.asarray(FREQUENCY), scale=D**-0.5),
        alone(by_expectation),
    ),
    "criticalkv": (CriticalKV(KeyNorm(size=48, unit=1)), alone(by_output)),
    "random": (Random(size=64, seed=7), alone(by_hash)),
}


def simulated(rule, s, b, size, unit):
    """The positions that each head stores: filled, then after every step; units of tokens, the last one perhaps open."""
    n = int(s.lengths[b])
    worth = rule(s, b, [list(range(n))] * H)
    units = []
    for h in range(H):
        stay = sorted(sorted(range(n), key=lambda p: (worth[h][p], p))[-size:])
        units.append([stay[i : i + unit] for i in range(0, len(stay), unit)])
    yield [set(sum(each, [])) for each in units]
    for now in range(n, n + s.steps):
        held = [sorted(sum(each, [])) for each in units]
        full = all(len(each) * unit == size and len(each[-1]) == unit for each in units)
        worth = rule(s, b, held) if full else None
        for h, each in enumerate(units):
            if len(each[-1]) < unit:
                each[-1].append(now)
                continue
            if full:
                value = dict(zip(held[h], worth[h]))
                each.remove(min(each, key=lambda one: (max(value[p] for p in one), max(one))))
            each.append([now])
        yield [set(sum(each, [])) for each in units]


@pytest.mark.parametrize("name", RULES)
def test_keeps_what_loops_keep(name, s):
    """Filled and after every step, in every row and head; and attention reads exactly what is stored."""
    retention, rule = RULES[name]
    policy = Policy(retention, Raw(), PageMajor() if name == "lagkv" else Contiguous(), ReadAll())
    norm = np.stack([norms(s)[b][:, n : n + s.steps] for b, n in enumerate(s.lengths)]).astype(np.float32)
    first, _, seen = tools.run(policy, s, own={"output_norm": jnp.asarray(np.moveaxis(norm, -1, 0))})
    for b in range(2):
        want = simulated(rule, s, b, first.budget, policy.unit)
        for step, each in zip(range(-1, s.steps), want):
            got = seen["first"] if step < 0 else seen["pos"][step]
            assert [kept(x) for x in got[b]] == each, (b, step)
    for step in (0, 40, s.steps - 1):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)


# --------------------------------------------------------------------------------------------------------- single rules


def filled(retention, s, budget, **changes):
    policy = Policy(retention, Raw(), Contiguous(), ReadAll())
    return np.asarray(fill(policy, dataclasses.replace(s.record, **changes), budget).pos)


def test_lagkv_keeps_the_newest_of_a_short_prompt(s):
    """A row shorter than its sinks and two partitions, in a batch with a longer one, keeps sinks and recents."""
    pos = filled(LagKV(size=64, sinks=4, lag=47), s, 64)
    assert kept(pos[1, 0]) == {*range(4), *range(37, 97)}
    assert kept(pos[0, 0]) != {*range(4), *range(90, 150)}, "the longer row has partitions to choose from"


def test_lagkv_is_not_troubled_by_channels_without_spread(s):
    """A channel that does not vary in the next partition divides by nothing: the rule stays the rule of the others."""
    key = s.record.key_BHTD.at[..., 3].set(1.0)
    pos = filled(LagKV(size=64, sinks=2, lag=10), s, 64, key_BHTD=key)
    lengths = [len(kept(pos[b, h])) for b in range(2) for h in range(H)]
    assert lengths == [64] * 4 and {0, 1} <= kept(pos[0, 0])


def test_chunks_leave_infinities_to_their_tokens(s):
    """CASES 2 through a chunk: protected tokens stay without their neighbours, and what inner never keeps never stays."""

    @tools.part
    class Even(KeyNorm):
        def priority(self, state, pos, now):
            return jnp.where(pos % 2 == 0, state, -jnp.inf)

    pos = filled(ChunkKV(Protect(KeyNorm(size=40), sinks=3, recent=5), 10), s, 40)
    for b, n in enumerate((150, 97)):
        assert {0, 1, 2, *range(n - 5, n)} <= kept(pos[b, 0]) == kept(pos[b, 1])
    pos = filled(ChunkKV(Even(size=40), 10), s, 40)
    assert len(kept(pos[0, 0])) == 40 and all(p % 2 == 0 for p in kept(pos[0, 0]))


def test_chunks_of_a_rule_that_knows_only_large_numbers(s):
    """Protection within protection: the largest float is no infinity, also where a chunk is full of it."""
    inner = Protect(Window(30, 100), sinks=1, recent=1)
    pos = filled(Protect(ChunkKV(inner, 10), sinks=6, recent=2), s, 30)
    assert {*range(6), 148, 149} <= kept(pos[0, 0]) and len(kept(pos[0, 0])) == 30


def test_random_draws_know_no_batch(s):
    both = filled(Random(size=64, seed=1), s, 64)
    alone = Record(s.record.key_BHTD[1:], s.record.value_BHTD[1:], s.record.pos_BT[1:])
    only = np.asarray(fill(Policy(Random(size=64, seed=1), Raw(), Contiguous(), ReadAll()), alone, 64).pos)
    np.testing.assert_array_equal(both[1], only[0])
    assert kept(both[0, 0]) != kept(both[0, 1]) and kept(filled(Random(size=64, seed=2), s, 64)[0, 0]) != kept(both[0, 0])


def test_criticalkv_at_its_ends(s):
    """first = 1 is the inner rule itself, first = 0 the product alone."""
    inner = KeyNorm(size=48, unit=1)
    np.testing.assert_array_equal(filled(CriticalKV(inner, 1.0), s, 48), filled(inner, s, 48))
    pos, norm = filled(CriticalKV(inner, 0.0), s, 48), norms(s)[0, 0]
    worth = [(x + 1e-4) * norm[p] for p, x in enumerate(by_norm(s, 0, 0, range(150)))]
    assert kept(pos[0, 0]) == set(np.argsort(worth)[-48:].tolist())


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="keydiff: ratio=None, size=None; give one"):
        KeyDiff()
    with pytest.raises(ConfigError, match="lag=0; sinks must be ≥ 0 and lag ≥ 1"):
        LagKV(size=64, lag=0)
    with pytest.raises(ConfigError, match="length=0; allowed: 1 or more"):
        ChunkKV(KeyNorm(size=4), 0)
    with pytest.raises(ConfigError, match="first=1.5; allowed: 0 … 1"):
        CriticalKV(KeyNorm(size=4), 1.5)
    with pytest.raises(ConfigError, match="KeyDiff.*allowed: a retention that keeps a token's score"):
        CriticalKV(KeyDiff(size=64))
    with pytest.raises(ConfigError, match="no rotary frequencies; write policy.at"):
        ExpectedAttention(size=64).score(jnp.zeros((1, 1, 4, 2)), None, jnp.zeros((1, 1, 4), int))
    with pytest.raises(ConfigError, match="no filters are loaded; write policy.at"):
        QFilters(size=64, filters="smollm2-135m").score(jnp.zeros((1, 1, 4, 2)), None, None)


def test_all_are_registered_and_evict_in_units_that_they_can():
    for name in ("key_norm", "keydiff", "lagkv", "q_filters", "expected_attention", "random"):
        made = RETENTIONS[name](ratio=0.5)
        assert made.budget(200, 300, 1) == 100 and (made.unit == PAGE) is made.renews, name
    for name in ("chunkkv", "criticalkv"):
        assert RETENTIONS[name](KeyNorm(ratio=0.5, unit=PAGE)).unit == PAGE


# ------------------------------------------------------------------------------------------------------------ with models


def test_a_model_gives_what_they_need(tiny):
    """Through prefill and decoding, a layer each: the policies' needs are met, and the cache stays at its budget."""
    policies = [
        Policy(keep, Raw(), Contiguous(), ReadAll())
        for keep in (ExpectedAttention(size=64, future=16), CriticalKV(ChunkKV(KeyNorm(size=50, unit=1), 5)))
    ]
    policies = [policy.at(layer, tiny.config) for layer, policy in enumerate(policies)]
    prompts = [list(range(1, 120)), list(range(40, 70))]
    engine = Engine(tiny)
    session = engine.start(engine.prefill(prompts, needs(policies)), policies, 70)
    session.run(70)
    for cache, size in zip(session.state.caches, (64, 50)):
        live = np.asarray((cache.pos >= 0).sum((-1, -2)))
        assert (live > size - PAGE).all() and (live <= size).all() and (np.asarray(cache.pos).max((-1, -2)) > 95).all()


def test_filters_are_the_first_singular_vectors_of_the_queries(tiny):
    """Also their side: queries have a negative mean along a filter, so keys with a long projection on it go."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 256, 64).tolist() for _ in range(2)]
    found = calibrate.directions(tiny, contexts)
    prompt = np.array(contexts, np.int32), np.full(2, 64, np.int32)
    records, _ = loop.prefill(tiny.config, tiny.params, *prompt, frozenset({"queries"}))
    for layer, h in np.ndindex(2, 2):
        query = np.asarray(records[layer].seen["queries"])[:, h].reshape(-1, 16) / tiny.config.attention(layer).scale
        first = np.linalg.svd(query)[2][0]
        np.testing.assert_allclose(found[layer, h], first * -np.sign(first @ query.mean(0)), atol=1e-3)


def test_calibrating_writes_what_the_retention_reads(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "load", lambda name: tiny)
    path, text = tmp_path / "tiny.safetensors", tmp_path / "text.txt"
    text.write_text("Keys that point where queries do stay. " * 3)
    done = CliRunner().invoke(cli.app, f"calibrate tiny --out {path} --text {text} --contexts 2 --length 64".split())
    assert done.exit_code == 0, done.output
    keep = QFilters(size=8, filters=str(path)).at(1, tiny.config)
    np.testing.assert_allclose(np.linalg.norm(keep.direction, axis=-1), 1, atol=1e-5)
    assert keep.at(0, tiny.config) is keep and keep.direction.shape == (2, 16)
    share_KH = HeadBudgets(KeepAll(), str(path)).at(1, tiny.config).share_KH
    assert share_KH.shape == (4, 2) and (np.diff(share_KH, axis=0) >= 0).all()
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["origin"])
    assert (
        about["model"] == "tiny" and about["contexts"] == 2 and about["digest"] == tiny.digest and len(about["text_digest"]) == 64
    )


def test_results_depend_on_what_is_in_the_files_that_parts_name(tmp_path):
    """Filters inside another retention too; a file that is not there is refused before anything runs."""
    (tmp_path / "f.safetensors").write_bytes(b"one")
    inner = {"name": "q_filters", "ratio": 0.5, "filters": str(tmp_path / "f.safetensors")}
    cell = Cell({"name": "tiny"}, {"name": "mqar"}, {"retention": {"name": "chunkkv", "inner": inner}})
    before = environment.files_digest(cell)
    (tmp_path / "f.safetensors").write_bytes(b"two")
    assert environment.files_digest(cell) != before != ""
    assert environment.files_digest(Cell({}, {}, {"retention": "keep_all"})) == ""
    with pytest.raises(ConfigError, match="no such file; give one of smollm2-135m"):
        Cell({}, {}, {"retention": {**inner, "filters": "none"}}).files()


def test_filters_of_another_model_are_refused(tiny, tmp_path):
    shape = dict(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, context=2048)
    direction = QFilters(size=8, filters="smollm2-135m").at(29, ModelConfig(**shape)).direction
    np.testing.assert_allclose(np.linalg.norm(direction, axis=-1), 1, atol=1e-5)
    with pytest.raises(ConfigError, match="filters of calibration 'smollm2-135m' has the shape .30, 3, 64., the model wants .2"):
        QFilters(size=8, filters="smollm2-135m").at(0, tiny.config)
    with pytest.raises(ConfigError, match="calibration 'none': no such file; give one of smollm2-135m"):
        QFilters(size=8, filters="none").at(0, tiny.config)
    save_file({"other": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="holds no filters.*kvlab calibrate"):
        QFilters(size=8, filters=str(tmp_path / "x.safetensors")).at(0, tiny.config)
