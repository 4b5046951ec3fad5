"""Learned eviction after a delay: the rule against loops in numpy, and its training through the model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import gates, memory, parts
from kvlab.codec import Int8
from kvlab.decode import Engine, needs, per_layer
from kvlab.errors import ConfigError
from kvlab.gates.importance import ImportanceConfig
from kvlab.models import load
from kvlab.models.transformer import bind
from kvlab.retention import DMS, AdaKV, Gated, Protect
from kvlab.train import evict
from kvlab.train.dms import loop, student
from kvlab.train.dms.step import Sequence, Trainer, Training
from tests import tools
from tests.test_importance import append_all, hidden_states, kept, naive_gate, policy, random_gate

DELAY, STEPS = 20, 90
FILE = {
    "name": "small",
    "question": "what will be missed?",
    "model": "tiny-recall",
    "held_out": 2,
    "dms": {"width": 8, "delay": 8, "steps": 30, "anneal": 10, "every": 10, "rate": 2e-2},
    "data": {"tasks": [{"name": "mqar", "length": 64, "pairs": 4, "queries": 4}], "contexts": 12},
}


# -------------------------------------------------------------------------------------------------------------- the rule


def units_kept(score, n, size, unit, steps=STEPS):
    """Positions that one head stores, as a prompt of `n` tokens left them and after each step, by loops over units of tokens."""

    def worth(p, now):
        return np.inf if p > now - DELAY else score[p]

    stay = sorted(sorted(range(n), key=lambda p: (worth(p, n - 1), p))[-size:])
    units = [stay[i : i + unit] for i in range(0, len(stay), unit)]
    yield set(stay)
    for now in range(n, n + steps):
        if len(units[-1]) < unit:
            units[-1].append(now)
        else:
            if len(units) * unit == size:
                units.remove(min(units, key=lambda one: (max(worth(p, now) for p in one), max(one))))
            units.append([now])
        yield {p for one in units for p in one}


@pytest.mark.parametrize("codec, size, unit", [(None, 40, 1), (Int8("channel"), 128, 64)], ids=["tokens", "pages"])
def test_what_stays_is_what_loops_keep(codec, size, unit):
    """At fill and after each of 90 tokens, the newest of which stay whatever their logit, in both rows and heads."""
    s = tools.sequence(lengths=(150, 97), steps=STEPS, D=16)
    gate, (hidden, record, later) = random_gate(), hidden_states(s)
    rule = policy(DMS(size=size, delay=DELAY, layer=gate.layer(1)), codec)
    first = rule.fill(record, rule.budget(150, 150 + STEPS))
    key, value = tools.appended(s)
    _, pos = append_all(rule, first, key, value, later, s.lengths + np.arange(STEPS)[:, None])
    for b, h in np.ndindex(2, 2):
        score = naive_gate(gate, 1, hidden[b])[h]
        for step, held in enumerate(units_kept(score, int(s.lengths[b]), size, unit), -1):
            assert kept(first.pos[b, h] if step < 0 else pos[step, b, h]) == held, (b, h, step)


def test_it_is_a_gated_retention_that_protects_its_newest(tmp_path):
    """The sign of the logit: one gate file serves both, and what `gated` keeps longest `dms` evicts last."""
    path, s = str(tmp_path / "gate.safetensors"), tools.sequence(D=16)
    gates.save(random_gate(), path)
    _, record, _ = hidden_states(s)
    same = DMS(gate=path, size=48, delay=12), Protect(Gated(gate=path, size=48), sinks=0, recent=12)
    shape = tools.tiny_model().config
    pos = [policy(rule.at(1, shape)).fill(record, 48).pos for rule in same]
    np.testing.assert_array_equal(*pos)
    assert set(range(138, 150)) <= kept(pos[0][0, 0]) and len(kept(pos[0][0, 0])) == 48


def test_heads_share_a_budget_under_adakv():
    """The gate's biases differ by head, so one head's tokens outrank the other's; the newest stay in both."""
    s, gate = tools.sequence(lengths=(180, 170), D=16), random_gate()
    gate.bias[...] = jnp.asarray([[0.0, 4.0]] * 2)
    rule = policy(AdaKV(DMS(size=96, delay=DELAY, layer=gate.layer(0)), safeguard=0.2))
    cache = rule.fill(hidden_states(s)[1], 128)
    held = np.asarray(memory.positions(rule, cache))
    for b, n in enumerate((180, 170)):
        poor, rich = (set(x[x >= 0].tolist()) for x in held[b].reshape(2, -1))
        assert len(poor) < len(rich) and set(range(n - DELAY, n)) <= poor & rich


@pytest.mark.parametrize(
    "options, unit, message",
    [
        ({"delay": 0, "size": 9}, 1, "dms: delay=0; allowed: 1 or more"),
        ({"delay": 65, "size": 64}, 1, "delay=65 needs 65 tokens, the budget is 64"),
        ({"delay": 3, "size": 64}, 64, "delay=3 needs 128 tokens, the budget is 64"),
        ({"delay": 64, "ratio": 0.5}, 1, "delay=64 needs 64 tokens, the budget is 50"),
    ],
)
def test_a_delay_that_the_budget_cannot_hold_is_refused(options, unit, message):
    with pytest.raises(ConfigError, match=message):
        DMS(**options).budget(100, 200, unit)


def test_a_gate_must_be_named(tiny):
    with pytest.raises(ConfigError, match="dms: no gate; write gate ="):
        DMS(size=64).at(0, tiny.config)


# ---------------------------------------------------------------------------------------------------------- the fading model


def tokens(n, vocab=256):
    return np.random.default_rng(4).integers(0, vocab, (1, n)).astype(np.int32)


def faded(model, ids, *how):
    """Logits and fadings, compiled."""
    return jax.jit(lambda params: student.run(model.config, params, ids, *how))(model.params)


def decided(model, ids, gate, delay, seen):
    """The model in numpy: each query attends to the tokens that `seen(scores of the head, query)` lists."""
    bound, T = bind(model.config, model.params), ids.shape[1]

    def attend(layer, query, key, value, x):
        spec = model.config.attention(layer)
        query, key, value = (np.asarray(each[0], np.float64) for each in (query, key, value))
        out, score = np.zeros(query.shape), naive_gate(gate, layer, np.asarray(x[0]))
        for i, h, g in np.ndindex(query.shape[:3]):
            held = seen(score[h], i) if spec.window is None else [t for t in range(i + 1) if t > i - spec.window]
            logits = key[held, h] @ query[i, h, g] * spec.scale
            logits = logits if spec.softcap is None else spec.softcap * np.tanh(logits / spec.softcap)
            weight = np.exp(logits - logits.max())
            out[i, h, g] = weight / weight.sum() @ value[held, h]
        return jnp.asarray(out, jnp.float32)[None]

    return bound.logits(bound(jnp.asarray(ids), jnp.arange(T)[None], attend))


def test_a_gate_that_evicts_nothing_leaves_the_model_as_it_is(tiny):
    """α = 0 in every layer, sinks or not, is dense attention, which prefill computes in another way."""
    ids, gate = tokens(96), random_gate()
    gate.bias[...] = jnp.full((2, 2), 1e4)
    logits, fades = faded(tiny, ids, gate, student.noisy(jax.random.key(0), 0.5), 8)
    np.testing.assert_allclose(logits[:, -1], Engine(tiny).prefill([ids[0].tolist()]).logits_BV, atol=1e-5)
    np.testing.assert_allclose(logits, faded(tiny, ids)[0], atol=1e-5)
    assert len(fades) == 2 and all(np.abs(x).max() < 1e-6 for x in fades)


@pytest.mark.parametrize("changes", [{}, {"windows": (9, None), "softcap": 5.0}], ids=["plain", "local"])
def test_decisions_of_all_or_nothing_are_attention_over_what_a_loop_keeps(changes):
    """α of 0 and 1, from noisy decisions over scores a million times as large; local layers are left alone."""
    model, gate, delay = tools.tiny_model(**changes), random_gate(), 6
    noisy = student.noisy(jax.random.key(1), 0.5)
    fade = lambda layer, score: noisy(layer, 1e6 * score)
    logits, fades = faded(model, tokens(30), gate, fade, delay)
    seen = lambda score, i: [t for t in range(i + 1) if i - t < delay or score[t] > 0]
    np.testing.assert_allclose(logits, decided(model, tokens(30), gate, delay, seen), atol=2e-4)
    gone = -np.expm1(np.stack(fades))
    assert len(fades) == (1 if changes else 2) and set(np.unique(gone)) == {0.0, 1.0}


def test_ranked_decisions_are_what_decoding_stores_and_reads():
    """Fed one by one, a cache of 24 tokens gives the student's logits at every step and holds what its last query sees."""
    model, gate, size, delay, T = tools.tiny_model(vocab=512), random_gate(), 24, 7, 100
    ids = np.random.default_rng(2).permutation(512)[None, :T].astype(np.int32)  # no token twice
    logits, made = faded(model, ids, gate, student.ranked(np.int32(size), delay), delay)
    policies = [policy(DMS(size=size, delay=delay, layer=gate.layer(i))) for i in range(2)]
    engine = Engine(model)
    session = engine.start(engine.prefill([ids[0, :10].tolist()], needs(policies)), policies, T, forced=[ids[0, 10:].tolist()])
    np.testing.assert_allclose(session.run(T - 10, ["logits"]).logits[:, 0], logits[0, 10:], atol=1e-4)
    for cache, hidden in zip(session.state.caches, made):
        for h in range(2):
            seen = {t for t in range(T) if T - 1 - t < delay or hidden[0, h, -1, t] == 0}
            assert kept(cache.pos[0, h]) == seen and len(seen) == size


# --------------------------------------------------------------------------------------------------------------- training


def batch(T=64, own=50):
    real = (np.arange(T) < own).astype(np.float32)[None]
    return Sequence(tokens(T), real, real)


def test_every_leaf_of_every_layer_has_a_gradient_and_the_base_stays(tiny):
    trainer = Trainer(tiny.config, Training(width=8, delay=8, start=0.0, even=False))
    values, base = trainer.first(), jax.tree.map(np.array, tiny.params)
    teacher, _ = faded(tiny, batch().tokens)
    given = tiny.params, batch(), teacher, 0.0, jax.random.key(0)  # a target of 0: through the model's logits alone
    gradient = jax.jit(jax.grad(lambda v: trainer.loss(v, *given)[0]))(values)
    for name, x in gradient.items():
        assert (np.abs(np.asarray(x)).reshape(2, -1).max(-1) > 1e-9).all(), name
    moved, _, figures = trainer.step(values, trainer.rule.init(values), tiny.params, *given[1:2], 0.5, given[-1])
    jax.tree.map(np.testing.assert_array_equal, tiny.params, base)
    assert np.isfinite(figures["loss"]) and set(moved) == set(values)


def test_pads_change_nothing(tiny):
    """Neither what counts nor the share that goes; noise is drawn for them too, so the decisions are hard ones."""
    trainer = Trainer(tiny.config, Training(width=8, delay=8, ratio=0.5))
    values = trainer.first()
    long, short = batch(), Sequence(*(x[:, :50] for x in batch()))
    got, want = (trainer.judge(values, tiny.params, data, np.int32(25)) for data in (long, short))
    assert got["kl"] == pytest.approx(float(want["kl"]), rel=1e-4) and got["kl"] > 0


@pytest.mark.parametrize("even", [True, False])
def test_the_penalty_drives_the_share_to_its_target(even):
    """One-sided: from far below it rises to the target, and not beyond; evenly, in every head."""
    model = load("tiny-recall")
    trainer = Trainer(model.config, Training(width=0, delay=8, steps=60, anneal=20, rate=5e-2, even=even))
    values, data = trainer.first(), Sequence(tokens(64), np.ones((1, 64), np.float32), np.ones((1, 64), np.float32))
    state, shares = trainer.rule.init(values), []
    for now in range(1, 61):
        key = jax.random.fold_in(jax.random.key(0), now)
        values, state, figures = trainer.step(values, state, model.params, data, trainer.training.target(now), key)
        shares.append(float(figures["evicted"]))
    assert shares[0] < 0.1 and abs(np.mean(shares[-10:]) - 0.5) < 0.05
    assert [trainer.training.target(n) for n in (0, 10, 20, 60)] == pytest.approx([0, 0.25, 0.5, 0.5])


def test_a_file_gives_a_gate_that_a_policy_reads(tmp_path):
    """On tiny-recall: half of the tokens go, and with the trained gate less is lost than with the untrained one."""
    summary = evict.train(FILE, out=tmp_path)
    assert summary["held_out_kl"] < summary["untrained_kl"] and 0 < summary["held_out_agreement"] <= 1
    assert summary["total"] == sum(gates.load(summary["gate"]).counts().values()) and evict.train(FILE, out=tmp_path) == summary
    assert gates.load(summary["gate"]).config == ImportanceConfig(2, 2, 64, 128, 8)
    rule = parts.policy({"retention": {"name": "dms", "gate": summary["gate"], "ratio": 0.5, "delay": 8}})
    engine = Engine(load("tiny-recall"))
    policies = per_layer(rule, engine.config)
    session = engine.start(engine.prefill([list(range(128))], needs(policies)), policies, 40)
    session.run(40)
    for cache in session.state.caches:
        for h in range(2):
            assert set(range(160, 168)) <= kept(cache.pos[0, h]) and len(kept(cache.pos[0, h])) == 64


def test_a_training_that_is_killed_goes_on_to_the_same_gate(tmp_path, monkeypatch):
    file = {**FILE, "dms": {**FILE["dms"], "steps": 6, "anneal": 2, "every": 2}}
    whole = evict.train(file, out=tmp_path / "whole")
    step = loop.Fit._step

    def killed(self, now, state):
        if now == 5:
            raise KeyboardInterrupt
        return step(self, now, state)

    monkeypatch.setattr(loop.Fit, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        evict.train(file, out=tmp_path / "cut")
    monkeypatch.undo()
    again = evict.train(file, out=tmp_path / "cut")
    assert again["held_out_kl"] == whole["held_out_kl"] and again["best"] == whole["best"]
    lines = (tmp_path / "cut/train/small/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 7, "every step once, and what was judged before the first"
    jax.tree.map(np.testing.assert_array_equal, *(gates.load(s["gate"]).values() for s in (whole, again)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"held_out": 12}, "held_out = 12 of data.contexts = 12"),
        ({"dms": {"dealy": 4}}, "no option 'dealy'.*did you mean 'delay'"),
        ({"dms": {"ratio": 1.0}}, "ratio between 0 and 1"),
        ({"importance": {}}, r"tables \['importance', 'dms'\]; write one of"),
        ({"teacher": "replay"}, "teacher"),
        ({"dms": {"delay": 40}}, "keeps 36 of a context's 7. tokens, delay=40 takes all"),
    ],
)
def test_wrong_files_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        evict.train({**FILE, **changes}, out=tmp_path)


def test_the_shipped_file_reads():
    path = Path(__file__).parents[1] / "experiments/train_dms_smollm2.toml"
    (name, file), (_, small) = evict.read(path), evict.read(path, smoke=True)
    assert name == "train_dms_smollm2" and evict.is_eviction({"dms": {}}) and not evict.is_eviction({"gate": {}})
    assert file.options.delay == 64 and small.options.steps < file.options.steps
