"""Importance: the teacher against dense numpy, learned scores against a naive evaluation, training that learns."""

import dataclasses
import json
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from flax import nnx

from kvlab import gates, generate, memory, parts, plan, replay
from kvlab.codec import Int8, Raw
from kvlab.core import EMPTY, PAGE
from kvlab.decode import Engine, needs, per_layer
from kvlab.errors import CapacityError, ConfigError
from kvlab.gates import GateConfig, ImportanceConfig, ImportanceGate
from kvlab.gates.store import with_values
from kvlab.layout import Contiguous
from kvlab.loop import fill
from kvlab.models import load
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind
from kvlab.plan import Dims
from kvlab.policy import Policy
from kvlab.retention import Gated, KeepAll, KVzip, Protect
from kvlab.selection import ReadAll
from kvlab.tasks import Answers
from kvlab.tasks.mqar import Mqar, sample
from kvlab.train import evict, importance, targets
from tests import tools

pytestmark = pytest.mark.compiled_quickly

SHAPE = ImportanceConfig(layers=2, kv_heads=2, head_dim=16, hidden=48, width=8)


def policy(retention, codec=None) -> Policy:
    return Policy(retention, codec or Raw(), Contiguous(), ReadAll())


def random_gate(config=SHAPE, seed=0) -> ImportanceGate:
    """A gate whose every number matters."""
    gate, rng = ImportanceGate(config), np.random.default_rng(seed)
    values = {k: jnp.asarray(rng.standard_normal(x.shape) * 0.3, jnp.float32) for k, x in gate.values().items()}
    return with_values(gate, values)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "gate.safetensors"
    gates.save(random_gate(), path, {"model": "tiny"})
    return str(path)


def naive_gate(gate: ImportanceGate, layer: int, hidden_TE, key_HTD=None, value_HTD=None):
    """Log-importance `[H, T]`, in numpy, a token and a head at a time."""
    p = {name: np.asarray(x[layer], np.float64) for name, x in gate.values().items()}
    rms = lambda x: x / np.sqrt(np.mean(x * x) + 1e-6)
    gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    out = np.zeros((gate.config.kv_heads, len(hidden_TE)))
    for h, t in np.ndindex(out.shape):
        x = rms(hidden_TE[t].astype(np.float64))
        out[h, t] = x @ p["linear"][:, h] + p["bias"][h]
        if gate.config.width:
            unit = x @ p["inward"] + p["inward_bias"]
            if gate.config.vectors:
                unit = unit + np.concatenate([rms(key_HTD[h, t]), rms(value_HTD[h, t])]) @ p["vectors"]
            out[h, t] += gelu(unit) @ p["outward"][:, h]
    return out


def kept(pos):
    pos = np.asarray(pos)
    return set(pos[pos >= 0].tolist())


# --------------------------------------------------------------------------------------------------------- the teacher


def dense_weights(model, ids):
    """Attention weights `[L][H, G, T, T]` of a sequence in numpy, with the full denominator."""
    found, T = [], len(ids)
    bound, pos = bind(model.config, model.params), np.arange(len(ids))

    def attend(layer, query, key, value, _):
        spec = model.config.attention(layer)
        logits = np.einsum("qhgd,shd->hgqs", np.asarray(query[0], np.float64), np.asarray(key[0], np.float64)) * spec.scale
        logits = logits if spec.softcap is None else spec.softcap * np.tanh(logits / spec.softcap)
        ok = pos <= pos[:, None]
        ok = ok if spec.window is None else ok & (pos > pos[:, None] - spec.window)
        weight = np.where(ok, np.exp(logits - logits.max(-1, keepdims=True)), 0)
        found.append(weight / weight.sum(-1, keepdims=True))
        return jnp.asarray(np.einsum("hgqs,shd->qhgd", found[-1], np.asarray(value[0])), jnp.float32)[None]

    bound(jnp.asarray([ids]), jnp.arange(T)[None], attend)
    return found


MODELS = {"plain": {}, "local": {"windows": (24, None), "softcap": 5.0}}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_following_is_the_largest_weight_of_later_queries(changes, rng):
    """CASES 22: each query's weights are shares of all that it sees, sinks and itself included."""
    model, ids = tools.tiny_model(**changes), rng.integers(0, 256, 90).tolist()
    got = targets.following(model, ids)
    for layer, weight in enumerate(dense_weights(model, ids)):
        later = np.where(np.arange(90) < np.arange(90)[:, None], weight, 0)
        np.testing.assert_allclose(got[layer], later.max((1, 2)), atol=1e-5)
    assert (got[:, :, -1] == 0).all() and (got[:, :, :-1] > 0).all()


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_replay_is_the_largest_weight_of_any_chunk_of_it(changes, rng):
    """CASES 22: the denominators hold the whole context and the replay itself; ragged rows, several chunks."""
    model, prompts = tools.tiny_model(**changes), [rng.integers(0, 256, n).tolist() for n in (90, 33)]
    engine = Engine(model)
    got = replay.importance(model, prompts, engine.prefill(prompts).records, chunk=40)
    for b, prompt in enumerate(prompts):
        T, want = len(prompt), [0.0] * 2
        parts = replay.replays(model, prompt, 40)
        assert len(parts) == -(-T // 40) and sum((p[-min(40, T - 40 * i) :] for i, p in enumerate(parts)), []) == prompt
        for part in parts:
            for layer, weight in enumerate(dense_weights(model, prompt + part)):
                want[layer] = np.maximum(want[layer], weight[:, :, T:, :T].max((1, 2)))
        for layer in range(2):
            np.testing.assert_allclose(got[layer][b, :, :T], want[layer], atol=1e-5)
            assert (np.asarray(got[layer][b, :, T:]) == 0).all(), "a pad is important"


def test_a_prompt_that_leaves_no_room_for_its_replay_is_refused():
    engine = Engine(tools.tiny_model(context=128))
    assert engine.prefill([[1] * 60], {"importance"}).records[0].seen["importance"].shape == (1, 2, 64)
    with pytest.raises(CapacityError, match="leave nothing of the 128.*needs no replay"):
        engine.prefill([[1] * 90], {"importance"})


def test_a_record_holds_normalised_hidden_states_and_log_importance(tiny, rng):
    ids = rng.integers(0, 256, 70).tolist()
    got = targets.record_context(tiny, ids, "following", vectors=True)
    hidden = np.asarray(tiny.params["embedding"])[ids]
    want = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got["hidden"][0], want, atol=2e-3)
    want = np.maximum(np.log(np.maximum(targets.following(tiny, ids), 1e-30)), targets.FLOOR)
    np.testing.assert_allclose(got["target"], want, atol=1e-6)
    assert got["key"].shape == got["value"].shape == (2, 2, 70, 16) and got["hidden"].dtype == np.float16
    with pytest.raises(ConfigError, match="teacher='replays'; did you mean 'replay'"):
        targets.record_context(tiny, ids, "replays")


# -------------------------------------------------------------------------------------------------- what a policy keeps


def hidden_states(s: tools.Sequence, seed=1):
    """Random hidden states of a whole sequence, the record that holds the prompt's, and those that are appended."""
    B, _, total, _ = s.key.shape
    hidden = np.random.default_rng(seed).standard_normal((B, total, 48)).astype(np.float32)
    T = s.record.pos_BT.shape[1]
    poison = np.where(np.asarray(s.record.pos_BT)[:, :, None] < 0, 1e4, hidden[:, :T])
    record = dataclasses.replace(s.record, seen={"hidden": jnp.asarray(poison)[:, None]})
    later = np.stack([hidden[b, n : n + s.steps] for b, n in enumerate(s.lengths)], 1)
    return hidden, record, jnp.asarray(later)[:, :, None]


@jax.jit
def append_all(policy, cache, key, value, hidden, pos):
    """Positions after every step `[steps, B, H, N, P]`."""

    def step(cache, x):
        k, v, h, p = x
        cache = policy.append(cache, k, v, p, seen={"hidden": h})
        return cache, cache.pos

    return jax.lax.scan(step, cache, (key, value, hidden, pos))


SIZES = {"linear": {"width": 0}, "two layers": {}, "vectors": {"vectors": True}}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_stays_is_what_a_naive_evaluation_scores_highest(sizes):
    """At fill and at each of 60 appended tokens, whose own hidden states decide."""
    s = tools.sequence(lengths=(150, 97), steps=60, D=16)
    gate = random_gate(dataclasses.replace(SHAPE, **sizes))
    hidden, record, later = hidden_states(s)
    rule = policy(Gated(size=64, layer=gate.layer(1)))
    cache = fill(rule, record, rule.budget(150, 210))
    key, value = tools.appended(s)
    _, pos = append_all(rule, cache, key, value, later, s.lengths + np.arange(60)[:, None])
    for b in range(2):
        score = naive_gate(gate, 1, hidden[b], s.key[b], s.value[b])
        for h in range(2):
            held = set(np.argsort(-score[h, : s.lengths[b]])[:64].tolist())
            assert kept(cache.pos[b, h]) == held
            for step in range(60):
                held.remove(min(held, key=lambda p: score[h, p]))
                held.add(int(s.lengths[b]) + step)
                assert kept(pos[step, b, h]) == held, step


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_pages_go_by_the_pooled_score_of_their_tokens(pool):
    """With a scale per page, the prompt keeps its best tokens and, as pages fill up, the lowest page goes."""
    s = tools.sequence(lengths=(180, 150), steps=140, D=16)
    gate, (hidden, record, later) = random_gate(), hidden_states(s)
    rule = policy(Gated(size=128, layer=gate.layer(0), pool=pool), Int8("channel"))
    cache = fill(rule, record, rule.budget(180, 320))
    key, value = tools.appended(s)
    _, pos = append_all(rule, cache, key, value, later, s.lengths + np.arange(140)[:, None])
    pooled = max if pool == "max" else lambda x: sum(x) / len(x)
    for b, h in np.ndindex(2, 2):
        score, n = naive_gate(gate, 0, hidden[b])[h], int(s.lengths[b])
        best = sorted(np.argsort(-score[:n])[:128].tolist())
        pages = [best[:64], best[64:]]
        assert [sorted(kept(page)) for page in cache.pos[b, h]] == pages
        newest = 1
        for step in range(140):
            if step % 64 == 0:
                newest = min(range(2), key=lambda i: pooled([score[p] for p in pages[i]]))
                pages[newest] = []
            pages[newest].append(n + step)
            assert [sorted(kept(page)) for page in pos[step, b, h]] == pages, step


def layer_zero(gate, model, ids):
    """Naive scores in the first layer, whose input is the embedding whatever is evicted."""
    return naive_gate(gate, 0, np.asarray(model.params["embedding"])[ids])


def test_a_model_keeps_the_top_of_its_prompt_and_of_what_follows(saved, rng):
    """Ratio 0.5 through prefill, 30 tokens fed one by one and a second turn: positions in the first layer, by a naive loop."""
    engine, ids = Engine(tools.tiny_model(vocab=512)), rng.permutation(512).tolist()  # no token twice, so there are no ties
    policies = per_layer(parts.policy({"retention": {"name": "gated", "gate": saved, "ratio": 0.5}}), engine.config)
    prompt = engine.prefill([ids[:200]], needs(policies))
    session = engine.start(prompt, policies, 120, forced=[ids[200:230]])
    held_at = [np.asarray(session.state.caches[0].pos)]
    session.run(30)
    held_at.append(np.asarray(session.state.caches[0].pos))
    session.extend([ids[230:250]])
    held_at.append(np.asarray(session.state.caches[0].pos))
    score = layer_zero(random_gate(), engine.model, ids)
    for h in range(2):
        held = set(np.argsort(-score[h, :200])[:100].tolist())
        assert kept(held_at[0][0, h]) == held
        for t in range(200, 250):
            held.remove(min(held, key=lambda p: score[h, p]))
            held.add(t)
            if t == 229:
                assert kept(held_at[1][0, h]) == held
        assert kept(held_at[2][0, h]) == held


def test_a_stream_and_its_turns_keep_what_a_loop_from_nothing_keeps(saved, rng):
    engine, ids = Engine(tools.tiny_model(vocab=512)), rng.permutation(512)[:400].tolist()
    rule = policy(Protect(Gated(gate=saved, size=64), sinks=2, recent=4))
    session = engine.stream([ids[:300]], rule, 120)
    session.extend([ids[300:]])
    score = layer_zero(random_gate(), engine.model, ids)
    for h in range(2):
        held: set[int] = set()
        for t in range(400):
            if len(held) == 64:
                held.remove(min((p for p in held if 2 <= p <= t - 4), key=lambda p: score[h, p]))
            held.add(t)
        assert kept(session.state.caches[0].pos[0, h]) == held


@pytest.mark.parametrize("codec", [Raw(), Int8(), Int8("channel")], ids=str)
@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_memory_shrinks_by_the_ratio(tiny, saved, codec, ratio, rng):
    """Codes shrink to the kept tokens, rounded up to a page, and stay; the score adds four bytes a token and head."""
    engine, prompt = Engine(tiny), rng.integers(0, 256, 700).tolist()
    rule = policy(Gated(gate=saved, ratio=ratio), codec)
    policies = per_layer(rule, tiny.config)
    session = engine.start(engine.prefill([prompt], needs(policies)), policies, 68)
    full = engine.start(engine.prefill([prompt]), policy(KeepAll(), codec), 68)
    pages, held = -(-int(700 * (1 - ratio)) // PAGE), session.state.caches[0]
    assert held.pos.shape == (1, 2, pages, PAGE) and full.state.caches[0].pos.shape[2] == 12
    per_page = memory.resident(full.state.caches[0].memory) / 12
    assert memory.resident(held.memory) == per_page * pages
    assert memory.resident(held.retained) == 4 * 2 * pages * PAGE
    session.run(40)
    assert memory.resident(session.state.caches[0]) == memory.resident(held)


def test_a_plan_counts_what_a_policy_needs(tiny, saved):
    dims = Dims(2, 2, 16, tiny.config, 1024)
    plain, gated, zipped = (
        plan.plan(dims, per_layer(policy(r), tiny.config), 1, 500)
        for r in (KeepAll(), Gated(gate=saved, ratio=0.5), KVzip(ratio=0.5))
    )
    assert gated.total("state") == zipped.total("state") == 2 * 4 * 2 * 256
    assert gated.workspace.records - plain.workspace.records == 2 * 4 * 512 * 48
    assert zipped.workspace.records - plain.workspace.records == 2 * 4 * 512 * 2


# --------------------------------------------------------------------------------------------------------------- KVzip


def test_kvzip_keeps_what_the_replay_weighs_most(tiny, rng):
    """By the teacher's own figures, per layer and head; tokens that come later outlive those of the prompt."""
    engine, prompt = Engine(tiny), rng.integers(0, 256, 120).tolist()
    rule = parts.policy({"retention": {"name": "protect", "inner": {"name": "kvzip", "ratio": 0.5}, "sinks": 0, "recent": 1}})
    policies = per_layer(rule, tiny.config)
    session = engine.start(engine.prefill([prompt], needs(policies)), policies, 40)
    want = targets.replayed(tiny, prompt)
    want[:, :, -1] = np.inf  # protected
    for layer, h in np.ndindex(2, 2):
        best = np.argsort(-want[layer, h])[:60].tolist()
        assert kept(session.state.caches[layer].pos[0, h]) == set(best)
    session.run(20)
    session.extend([[1, 2, 3]])
    for layer, h in np.ndindex(2, 2):
        want[layer, h, -1] = targets.replayed(tiny, prompt)[layer, h, -1]
        order = [p for p in np.argsort(-want[layer, h]).tolist() if p in kept(session.state.caches[layer].pos[0, h])]
        assert len(order) == 60 - 23
        assert kept(session.state.caches[layer].pos[0, h]) - set(order) == set(range(120, 143))


def test_generating_asks_for_what_a_policy_needs(tiny, saved):
    engine, ids = Engine(tiny), list(range(200))
    for rule in (KVzip(ratio=0.5), Gated(gate=saved, ratio=0.5)):
        assert generate.generate(engine, policy(rule), ids, 8)["resident_ratio"] < 0.6


def test_kvzip_cannot_be_streamed(tiny):
    with pytest.raises(ConfigError, match="'importance'.*write engine.prefill, not stream"):
        Engine(tiny).stream([[1, 2, 3]], policy(KVzip(size=64)), 4)


# ---------------------------------------------------------------------------------------------------------------- errors


def test_what_is_missing_or_does_not_fit_is_refused(tiny, saved, tmp_path):
    engine = Engine(tiny)
    with pytest.raises(ConfigError, match="needs .'hidden'.*engine.prefill.prompts, needs"):
        engine.start(engine.prefill([[1, 2, 3]]), policy(Gated(gate=saved, ratio=0.5)), 4)
    with pytest.raises(ConfigError, match="gated: no gate; write gate ="):
        per_layer(policy(Gated(ratio=0.5)), tiny.config)
    with pytest.raises(ConfigError, match="hidden states of 48; the model's have 96"):
        per_layer(policy(Gated(gate=saved, ratio=0.5)), dataclasses.replace(tiny.config, hidden=96))
    with pytest.raises(ConfigError, match="2 KV heads of 16; the model has 2, 3 of 16"):
        per_layer(policy(Gated(gate=saved, ratio=0.5)), dataclasses.replace(tiny.config, kv_heads=3))
    other = str(tmp_path / "other.safetensors")
    gates.save(gates.make("spatial", GateConfig(2, 2, 16)), other)
    with pytest.raises(ConfigError, match="of kind 'spatial', the retention wants 'importance'"):
        per_layer(policy(Gated(gate=other, ratio=0.5)), tiny.config)
    with pytest.raises(ConfigError, match="importance takes a ImportanceConfig, not a GateConfig"):
        gates.make("importance", GateConfig(2, 2, 16))
    with pytest.raises(ConfigError, match="width=0, vectors=True"):
        ImportanceConfig(2, 2, 16, 48, 0, True)


@pytest.mark.parametrize(
    "options,message",
    [
        ({}, "ratio=None, size=None; give one"),
        ({"ratio": 0.5, "size": 9}, "ratio=0.5, size=9; give one"),
        ({"ratio": 1.5}, "ratio=1.5; allowed: 0"),
        ({"size": 0}, "size=0; allowed: 1 or more"),
        ({"size": 64, "unit": 16}, "unit: 1, 64 or left out"),
        ({"size": 64, "pool": "sum"}, "pool='sum'"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        KVzip(**options)


@pytest.mark.parametrize("prompt,ratio,left", [(100, 0.9, 10), (101, 0.5, 50), (1, 0.9, 1)])
def test_a_ratio_is_of_the_prompt_without_its_pads(prompt, ratio, left):
    """CASES 1: the floor of exact arithmetic, whatever the room for new tokens."""
    assert policy(KVzip(ratio=ratio)).budget(prompt, 512) == left


# -------------------------------------------------------------------------------------------------------------- training


def records(n, tokens=256, seed=0, vectors=False):
    """Records whose target a linear map of the hidden state makes, with some noise."""
    rng = np.random.default_rng(seed)
    map_LEH = np.random.default_rng(9).standard_normal((2, 48, 2)) / 4
    made = []
    for _ in range(n):
        hidden = rng.standard_normal((2, tokens, 48))
        target = np.einsum("lte,leh->lht", hidden, map_LEH) - 6 + 0.1 * rng.standard_normal((2, 2, tokens))
        made.append({"hidden": hidden.astype(np.float16), "target": target.astype(np.float32)})
        if vectors:
            made[-1] |= {name: rng.standard_normal((2, 2, tokens, 16)).astype(np.float16) for name in ("key", "value")}
    return made


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_parameter_has_a_gradient(sizes):
    config = dataclasses.replace(SHAPE, **sizes)
    batch = records(1, 64, vectors=config.vectors)[0]
    gradient = jax.grad(importance.loss)(ImportanceGate(config).values(), config, batch)
    assert set(gradient) == set(ImportanceGate(config).counts())
    for name, x in gradient.items():
        assert (np.abs(np.asarray(x)).reshape(config.layers, -1).max(-1) > 1e-6).all(), name


def test_training_learns_and_keeps_the_best_gate():
    train, held_out = records(3), records(1, seed=5)
    training = importance.Training(width=8, epochs=12, rows=64, rate=2e-2)
    gate, log = importance.fit(train, held_out, training, tools.tiny_model().config)
    best = max(line["overlap"] for line in log)
    assert best > 0.9 and log[0]["overlap"] < best and log[-1]["loss"] < 0.2 * log[0]["loss"]
    assert importance.validate(gate, held_out, 0.5)["overlap"] == best
    again, _ = importance.fit(train, held_out, training, tools.tiny_model().config)
    jax.tree.map(np.testing.assert_array_equal, gate.values(), again.values())
    with pytest.raises(ConfigError, match="3 contexts with 256 tokens at most, 0 held out"):
        importance.fit(train, [], training, tools.tiny_model().config)
    with pytest.raises(ConfigError, match="epochs=0"):
        importance.Training(epochs=0)


def test_a_trained_gate_recalls_what_a_window_of_its_size_forgets(tmp_path):
    """The whole way on tiny-recall: records, training, a file, a policy that keeps a quarter of contexts it never saw."""
    model, path = load("tiny-recall"), str(tmp_path / "gate.safetensors")
    engine, task = Engine(model), Mqar(length=256, contexts=1, pairs=16, queries=16)

    def context(seed):
        drawn = sample(np.random.default_rng([50, seed]), 1, 240, 16, 16)
        return np.concatenate([drawn.context_BT[0], drawn.query_BQ[0]]).tolist()

    train, held_out = ([targets.record_context(model, context(i), "following") for i in x] for x in (range(6), (9,)))
    gates.save(importance.fit(train, held_out, importance.Training(16, epochs=15, rows=128, rate=1e-2), model.config)[0], path)

    def hits(retention):
        policies = per_layer(parts.policy({"retention": retention}), model.config)
        batch = task.batch(0, 0, model.tokenizer)
        prompt = engine.prefill(batch.prompts, needs(policies))
        session = engine.start(prompt, policies, batch.new_tokens, batch.rows, batch.forced)
        session.run(batch.new_tokens)
        answers = [model.tokenizer.decode(ids) for ids in session.answers()]
        return sum(row["correct"] for row in task.score(batch, Answers(answers)))

    assert hits("keep_all") == 16
    assert hits({"name": "gated", "gate": path, "ratio": 0.75}) >= 14
    assert hits({"name": "window", "size": 60, "sinks": 4}) <= 8


def test_a_model_without_words_for_the_request_is_refused():
    with pytest.raises(ConfigError, match="tiny-recall has no tokens for the request.*needs no replay"):
        Engine(load("tiny-recall")).prefill([[1, 2, 3]], {"importance"})


def test_agreement_by_hand():
    a, b = np.array([[[1.0, 2, 3, 4]]]), np.array([[[2.0, 1, 3, 4]]])
    assert importance.agreement(a, b, 0.25) == {"spearman": pytest.approx(0.8), "overlap": 1.0}
    assert importance.agreement(a, -a, 0.5) == {"spearman": pytest.approx(-1.0), "overlap": 0.0}
    assert importance.agreement(a, 0 * a, 0.5)["spearman"] == 0.0


def test_contexts_are_recorded_once_and_train_from_disk(tiny, tmp_path, monkeypatch, rng):
    contexts = [rng.integers(0, 256, 80).tolist() for _ in range(2)]
    made = importance.recorded(tiny, contexts, tmp_path, "following")
    monkeypatch.setattr(targets, "record_context", None)
    again = importance.recorded(tiny, contexts[::-1], tmp_path, "following")
    assert again.paths == made.paths[::-1] and len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    want = targets.record_context(tiny, contexts[1], "following")
    jax.tree.map(np.testing.assert_array_equal, dict(made[1]), want)
    assert importance.recorded(tiny, contexts[:1], tmp_path, "replay").paths[0] not in made.paths
    gate, log = importance.fit(made, made, importance.Training(width=4, epochs=2, rows=32), tiny.config)
    assert len(log) == 2 and gate.config == ImportanceConfig(2, 2, 16, 48, 4)


def test_a_gate_on_disk_is_the_gate(tmp_path):
    for i, sizes in enumerate(SIZES.values()):
        gate, path = random_gate(dataclasses.replace(SHAPE, **sizes)), str(tmp_path / f"{i}.safetensors")
        gates.save(gate, path)
        back = gates.load(path)
        assert isinstance(back, ImportanceGate) and back.config == gate.config and isinstance(back.linear, nnx.Param)
        jax.tree.map(np.testing.assert_array_equal, back.values(), gate.values())


def test_padding_and_other_rows_change_nothing(tiny, saved, rng):
    """A row keeps alone what it keeps beside a longer one, for the same number of tokens."""
    engine, prompts = Engine(tiny), [rng.integers(0, 256, n).tolist() for n in (90, 300)]
    rule = policy(Gated(gate=saved, size=40))
    policies = per_layer(rule, tiny.config)
    both = engine.start(engine.prefill(prompts, needs(policies)), policies, 4).state.caches
    alone = engine.start(engine.prefill(prompts[:1], needs(policies)), policies, 4).state.caches
    for a, b in zip(both, alone):
        for h in range(2):
            assert kept(a.pos[0, h]) == kept(b.pos[0, h]) and EMPTY not in kept(a.pos[0, h])


# ------------------------------------------------------------------------------------------------------------ a file's run


EVICTION = {
    "name": "small",
    "question": "what will be needed?",
    "model": "tiny-recall",
    "teacher": "following",
    "held_out": 1,
    "importance": {"width": 4, "epochs": 2, "rows": 64},
    "data": {"tasks": [{"name": "mqar", "length": 128, "pairs": 8, "queries": 4}], "contexts": 3},
}


def test_a_file_gives_a_gate_that_evicts(tmp_path):
    summary = evict.train(EVICTION, out=tmp_path)
    assert summary["total"] == sum(gates.load(summary["gate"]).counts().values()) and 0 < summary["overlap"] <= 1
    shards = {f: f.stat().st_mtime_ns for f in (tmp_path / "records/importance").iterdir()}
    assert len(shards) == 3 and evict.train(EVICTION, out=tmp_path) == summary
    evict.train({**EVICTION, "name": "other", "importance": {"width": 0, "epochs": 1, "rows": 64}}, out=tmp_path)
    assert {f: f.stat().st_mtime_ns for f in shards} == shards, "recorded once"
    policy = parts.policy({"retention": {"name": "gated", "gate": summary["gate"], "ratio": 0.5}})
    engine = Engine(load("tiny-recall"))
    prompt = engine.prefill([list(range(128))], policy.retention.needs)
    session = engine.start(prompt, policy, 8)
    assert all(int((cache.pos >= 0).sum(-1).sum(-1).max()) == 64 for cache in session.state.caches)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"held_out": 3}, "held_out = 3 of data.contexts = 3"),
        ({"importance": {"widht": 4}}, "no option 'widht'"),
        ({"teacher": "oracle"}, "teacher"),
        ({"data": {"contexts": 3}}, "no source"),
    ],
)
def test_wrong_files_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        evict.train({**EVICTION, **changes}, out=tmp_path)


# -------------------------------------------------------------------------------------------------- the gate that ships


def test_the_gate_that_ships_is_what_its_file_says():
    """Its training is the experiment's; half precision, so it stays small; it fits the model it was trained for."""
    name, experiments = "smollm2-135m-evict", Path(__file__).parent.parent / "experiments"
    folder, training = gates.find(name).parent, evict.read(experiments / "train_evict_smollm2.toml")[1]
    assert tomllib.loads((folder / f"{name}.toml").read_text()) == msgspec.json.decode(msgspec.json.encode(training))
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert len(lines) == training.options.epochs and max(line["overlap"] for line in lines) > 0.75
    assert gates.find(name).stat().st_size < 2.5e6 and gates.store.origin(name)["model"] == training.model
    shape = ModelConfig(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=64, context=8192)
    assert Gated(gate=name, ratio=0.5).at(29, shape).layer.linear_EH.shape == (576, 3)


def test_half_precision_changes_no_more_than_its_last_bits(tmp_path):
    gate = random_gate()
    gates.save(gate, tmp_path / "half.safetensors", dtype="float16")
    back = gates.load(str(tmp_path / "half.safetensors")).values()
    for name, x in gate.values().items():
        assert back[name].dtype == jnp.float32
        np.testing.assert_allclose(back[name], x, rtol=2**-11, atol=1e-7)
