"""Training of gates: what is recorded, that gradients arrive, that training picks what decoding picks, runs that go on."""

import dataclasses
import json
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kvlab import gates, models, parts
from kvlab.attention import AttentionSpec
from kvlab.codec import Raw
from kvlab.core import EMPTY, Around, Record
from kvlab.decode import Engine
from kvlab.errors import ConfigError, ResultsError
from kvlab.gates import losses
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import HySparse, Lightning
from kvlab.tasks import Mqar
from kvlab.train.gate import config, loop, picking, record, step, student
from kvlab.train.gate.config import Stage
from kvlab.train.gate.record import Batch
from kvlab.train.gate.step import Recorded, Trainer
from kvlab.train.store import Folder

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SMALL = {
    "name": "small",
    "question": "does it train?",
    "model": "tiny-recall",
    "log": 1,
    "save": 2,
    "gate": {"rank": 8},
    "selection": {"sparsity": 0.75, "sinks": 1, "recent": 2},
    "data": {"tasks": [{"name": "mqar", "length": 120, "pairs": 8, "queries": 4}], "contexts": 5, "queries": 12},
    "stages": [
        {"loss": "kl", "steps": 4, "contexts": 2, "warmup": 1},
        {"loss": "straight_through", "steps": 3, "warmup": 1, "anneal": 2},
    ],
    "validate": {"every": 2, "contexts": 1},
    "evaluate": [{"name": "mqar", "length": 120, "pairs": 8, "queries": 4, "contexts": 2}],
}


def small(**changes):
    return {**SMALL, **changes}


def trainer(model, kind="spatial", **options):
    c = model.config
    shape = {"rank": 8, "threshold": options.get("mode") == "threshold", "inputs": options.pop("inputs", "post")}
    gate = gates.make(kind, gates.GateConfig(c.layers, c.kv_heads, c.head_dim, **shape))
    cls = HySparse if kind == "spatial" else Lightning
    return gate, Trainer(c, gate, cls(**{"sparsity": 0.75, "sinks": 1, "recent": 2, **options}), tuple(range(c.layers)))


def values(gate):
    return {name: jnp.asarray(x) for name, x in gate.values().items()}


def sequences(T=128, before=32):
    tokens = np.random.default_rng(0).integers(0, 256, (1, T + 1)).astype(np.int32)
    ones = np.ones((1, T - before), np.float32)
    return Batch(tokens[:, :before], tokens[:, before:-1], tokens[:, before + 1 :], ones, ones)


def after(c, params, gate, selection, how, data: Batch):
    """The student's logits and what it saw."""

    def run(before, tokens):
        past = student.prefill(c, params, before)
        return student.run(c, params, gate, selection, how, past, tokens)

    return jax.jit(run)(data.before, data.tokens)


def recorded(model, data: Batch, pos=None) -> Recorded:
    tokens = np.concatenate([data.before, data.tokens], 1)
    pos = np.arange(40, tokens.shape[1] - 1, 5) if pos is None else np.array(pos)
    query, key = record.capture(model.config, model.params, tokens, pos, tuple(range(model.config.layers)))
    return Recorded(query[None], key[None], pos[None])


# -------------------------------------------------------------------------------------------------------- what is recorded


def test_shards_hold_the_models_queries_and_keys_and_are_as_large_as_predicted(tmp_path):
    model = models.load("tiny-recall")
    data = config.read(SMALL)[1][""].data
    records = record.Records.of(model, data, tmp_path)
    shard = records.load(1)
    made = record.context(data, model.tokenizer, 1)
    length = int(shard["length"])
    assert shard["tokens"][:length].tolist() == made.tokens.tolist() and (shard["pos"] == made.pos).all()
    prefill = Engine(model).prefill([made.tokens.tolist()])
    for layer, kept in enumerate(prefill.records):
        np.testing.assert_allclose(shard["key"][layer, :, :length], kept.key_BHTD[0, :, :length], atol=5e-3)
    header = len(records.shard(1).read_bytes()) - record.size(model, data, len(shard["tokens"]))
    assert 0 < header < 1024, "the size is predicted, less safetensors' header"


def test_questions_come_first_and_answers_count(tmp_path):
    model = models.load("tiny-recall")
    data = config.read(SMALL)[1][""].data
    made = record.context(data, model.tokenizer, 0)
    counted = np.flatnonzero(made.weight) - 1
    assert len(counted) == 4 and (counted >= made.prompt).all() and set(counted) <= set(made.pos)
    batch = config.parts.build(data.tasks[0], config.TASKS, "task").batch(0, data.seed, model.tokenizer)
    assert model.tokenizer.strings(made.tokens[counted]) == [model.tokenizer.decode(f) for f in batch.forced]
    assert model.tokenizer.strings(made.tokens[counted + 1]) == batch.targets


def test_a_second_training_of_the_same_base_records_nothing(tmp_path):
    (first,) = loop.record(SMALL, out=tmp_path)
    before = {f.name: f.stat().st_mtime_ns for f in first.iterdir()}
    loop.train(small(name="other", seed=7, stages=SMALL["stages"][:1]), out=tmp_path)
    assert {f.name: f.stat().st_mtime_ns for f in first.iterdir()} == before
    assert [f for f in (tmp_path / "records").iterdir()] == [first]


def test_what_does_not_fit_on_the_disk_is_refused_beforehand(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(record.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResultsError, match="needs .* GB, 0.00 GB are free"):
        loop.record(SMALL, out=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


# --------------------------------------------------------------------------------------------------------------- gradients


LOSSES = {
    "kl": Stage(1, "kl"),
    "soft": Stage(1, "soft", distil=0, kl=0),
    "straight-through": Stage(1, "straight_through", distil=0, kl=0),  # through the next token's likelihood alone
    "joint": Stage(1, "straight_through", distil=0, kl=0, joint=True, detach=False),
}
CASES = [(name, "spatial") for name in LOSSES] + [("kl", "lightning"), ("straight-through", "lightning")]


@pytest.mark.parametrize("name, kind", CASES, ids=" ".join)
def test_every_leaf_of_every_layer_has_a_gradient(tiny, name, kind):
    """CASES 21: a hard choice has none of its own."""
    stage, (gate, made) = LOSSES[name], trainer(tiny, kind)
    data = sequences()
    loss = made.kl_loss if stage.loss == "kl" else made.model_loss
    given = recorded(tiny, data) if stage.loss == "kl" else data
    trained = {"gate": values(gate), **({"base": tiny.params} if stage.joint else {})}
    grad = jax.jit(jax.grad(lambda t: loss(t, tiny.params, given, stage, 0.75)[0]))(trained)
    for leaf, x in grad["gate"].items():
        rows = x if leaf in ("scale", "channels", "heat", "weight") or kind == "lightning" else x[None]
        assert np.isfinite(x).all() and all(np.abs(row).max() > 0 for row in rows), leaf
    if stage.joint:
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(grad["base"]["blocks"]))


def test_thresholds_learn_and_the_regulariser_moves_the_share(tiny):
    gate, made = trainer(tiny, mode="threshold")
    data, stage = recorded(tiny, sequences()), Stage(150, "kl", rate=3e-2, ratio=30.0, warmup=1)
    share = jax.jit(lambda v: made.recorded(v, data, 0.75)[2])
    state = step.State({"gate": values(gate)}, None, None, None, None)
    rule = step.rule(stage)
    state = state._replace(optimiser=rule.init(state.trained))
    advance = made.compiled(stage, rule)
    before = float(share(state.trained["gate"]))
    for _ in range(150):
        state, _ = advance(state, tiny.params, data, 0.75)
    after = float(share(state.trained["gate"]))
    assert abs(before - 0.25) > 0.1 and abs(after - 0.25) < 0.03, (before, after)


# ------------------------------------------------------------------------------------------- training picks what decoding picks


SELECTIONS = {
    "plain": {},
    "int8 index": {"dtype": "int8"},
    "max_k": {"max_k": 9},
    "windows": {"window_norm": "softmax"},
    "tempered": {"window_norm": "tempered", "alpha": 0.3, "sparsity": 0.5},
    "pre": {"inputs": "pre"},
    "threshold": {"mode": "threshold"},
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_training_and_decoding_pick_the_same_tokens(tiny, name):
    """Index for index, in every layer, for queries in the middle of pages and at their ends."""
    gate, made = trainer(tiny, **SELECTIONS[name])
    data = recorded(tiny, sequences(T=192), [0, 5, 63, 64, 100, 127, 128, 190])
    query, key = (x.astype(jnp.float32) for x in data[:2])

    @jax.jit
    def trained(selection, query, key):
        score, ok = picking.scores(selection, query, key, data.pos)
        return picking.hard(selection, score, ok, selection.sparsity)[0]

    @jax.jit
    def decoded(selection, query, key, pos):
        cache = Policy(KeepAll(), Raw(), Contiguous(), selection).fill(Record(key, key, pos), 192)
        return selection.select(cache.index, query, cache.pos >= 0, cache, Around(None, None)).index[0]

    for number in range(tiny.config.layers):
        spec = tiny.config.attention(number)
        selection = dataclasses.replace(made.selection, layer=gate.at(number, tiny.config))
        scaled = query[:, number] * spec.scale
        picked = np.asarray(trained(selection, scaled, key[:, number]))
        for i, now in enumerate(data.pos[0]):
            pos = jnp.where(jnp.arange(192) <= now, jnp.arange(192), EMPTY)[None]
            for head, index in enumerate(np.asarray(decoded(selection, scaled[:, i], key[:, number], pos))):
                assert index[index >= 0].tolist() == np.flatnonzero(picked[head, i]).tolist()


@pytest.mark.parametrize("pool", ["mean", "softmax"])
def test_reading_everything_is_the_model(tiny, pool):
    """Sparsity 0, by hard choice and through the estimator, gives the dense model's logits."""
    c, data = tiny.config, sequences()
    gate = gates.make("spatial", gates.GateConfig(c.layers, c.kv_heads, c.head_dim, rank=8, pool=pool))
    run = lambda gate, selection, how: after(c, tiny.params, gate, selection, how, data)
    dense, _ = run(None, None, student.Reading("hard", 0.0))
    for mode in ("hard", "straight_through"):
        logits, seen = run(gate, HySparse(sparsity=0.0), student.Reading(mode, 0.0))
        np.testing.assert_allclose(logits, dense, atol=1e-5)
        assert seen.recall == pytest.approx(1, abs=1e-5) and seen.share == 1


def test_a_prefill_without_gradients_is_the_one_with_them(tiny):
    """Two ways of dense attention: keys and values of every layer agree, also where blocks do not fill a power of two."""
    tokens = sequences(before=96).before
    a, b = (jax.jit(lambda t, f=f: student.prefill(tiny.config, tiny.params, t, f))(tokens) for f in (True, False))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)


def test_a_joint_stage_trains_the_base_through_what_was_prefilled(tiny):
    """The gradient counts what the base's parameters do to keys and values of the prompt: it is not the frozen prompt's."""
    stage, (gate, made), data = LOSSES["joint"], trainer(tiny), sequences()
    lm = lambda base, past: student.run(
        tiny.config, base, gate, made.selection, student.Reading("straight_through", 0.75, detach=False), past, data.tokens
    )[0]
    cross = lambda logits: -jnp.take_along_axis(jax.nn.log_softmax(logits), data.target[..., None], -1).mean()
    past = lambda base: student.prefill(tiny.config, base, data.before, frozen=False)
    frozen = jax.jit(jax.grad(lambda base: cross(lm(base, past(tiny.params)))))(tiny.params)
    trained = {"gate": values(gate), "base": tiny.params}
    got = jax.jit(jax.grad(lambda t: made.model_loss(t, tiny.params, data, stage, 0.75)[0]))(trained)["base"]
    assert np.abs(got["blocks"][0]["qkv"] - frozen["blocks"][0]["qkv"]).max() > 1e-3 * np.abs(frozen["blocks"][0]["qkv"]).max()


@pytest.mark.parametrize("begin", [0, 128])
def test_the_student_reads_as_the_decode_loop_does(tiny, tmp_path, begin):
    """Logits of the hard student equal those decoded with the gate after a prompt that was prefilled densely."""
    c, data = tiny.config, sequences(T=192, before=begin)
    tokens = np.concatenate([data.before, data.tokens], 1)[0].tolist()
    count = 12 if begin else 24
    gate = gates.make("spatial", gates.GateConfig(c.layers, c.kv_heads, c.head_dim, rank=8))
    gates.save(gate, tmp_path / "gate.safetensors")
    selection = HySparse(gate=str(tmp_path / "gate.safetensors"), sparsity=0.75, sinks=1, recent=2, dtype="float32")
    wanted, seen = after(c, tiny.params, gate, selection, student.Reading("hard", 0.75), data)
    assert seen.share < 0.5
    first = max(begin, 1)  # a session starts with something
    policy = Policy(KeepAll(), Raw(), Contiguous(), selection)
    engine = Engine(tiny)
    session = engine.start(engine.prefill([tokens[:first]]), policy, count, None, [tokens[first : begin + count]])
    got = session.run(begin + count - first, ["logits"]).logits[:, 0]
    np.testing.assert_allclose(got, wanted[0, first - begin : count], atol=1e-4)


def test_a_context_is_cut_where_its_prompt_ends(tmp_path):
    records = record.Records.of(models.load("tiny-recall"), config.read(SMALL)[1][""].data, tmp_path)
    shard, batch = records.load(0), records.batch([0])
    begin, length = batch.before.shape[1], int(shard["length"])
    assert np.concatenate([batch.before, batch.tokens], 1)[0].tolist() == shard["tokens"].tolist()
    assert 0 < begin < shard["prompt"] <= begin + -(-len(shard["tokens"]) // record.PARTS)
    assert batch.target[0, : length - 1 - begin].tolist() == shard["tokens"][begin + 1 : length].tolist()
    assert batch.ok[0].sum() == length - 1 - begin and batch.weight.sum() == shard["weight"].sum()
    assert (batch.weight[~batch.ok] == 0).all()


# ------------------------------------------------------------------------------------------------------------ the teacher


def test_the_teachers_denominator_holds_every_token(rng):
    """CASES 22: sinks and recent tokens are in it, and query heads are averaged."""
    query, key = rng.standard_normal((1, 3, 2, 4, 8)), rng.standard_normal((1, 2, 64, 8))
    key[:, :, 0] *= 4
    now = np.array([[10, 40, 63]])
    ok = np.broadcast_to(np.arange(64) <= now[:, None, :, None], (1, 2, 3, 64))
    got = losses.attention(jnp.asarray(query), jnp.asarray(key), jnp.asarray(ok), AttentionSpec(8**-0.5))
    for h, q in np.ndindex(2, 3):
        weights = np.exp(query[0, q, h] @ key[0, h, : now[0, q] + 1].T * 8**-0.5)
        wanted = (weights / weights.sum(-1, keepdims=True)).mean(0)
        np.testing.assert_allclose(got[0, h, q, : now[0, q] + 1], wanted, atol=1e-5)
        assert (got[0, h, q, now[0, q] + 1 :] == 0).all()


def test_divergence_is_zero_only_at_the_teacher(rng):
    score = jnp.asarray(rng.standard_normal((1, 1, 4, 16)), jnp.float32)
    ok = jnp.arange(16) <= jnp.array([3, 7, 11, 15])[:, None]
    teacher = jax.nn.softmax(jnp.where(ok, score, losses.HIDDEN), -1)
    assert abs(losses.divergence(teacher, score, ok)) < 1e-6
    assert losses.divergence(teacher, 2 * score, ok) > 0.01


def test_no_choice_covers_more_than_the_best_tokens(tiny):
    gate, made = trainer(tiny, sinks=0, recent=1)
    data = recorded(tiny, sequences())
    got = jax.jit(made.recorded)(values(gate), data, 0.75)[1]
    best = []
    for layer in range(2):
        ok = jnp.arange(128) <= data.pos[:, None, :, None]
        teacher = losses.attention(*(x[:, layer].astype(jnp.float32) for x in data[:2]), ok, tiny.config.attention(layer))
        number = -(-(data.pos[0] + 1) // 4)
        best.append(np.mean([np.sort(np.asarray(teacher[0, :, q]))[:, -n:].sum(-1).mean() for q, n in enumerate(number)]))
    assert 0.1 < got <= np.mean(best) + 1e-6


# ------------------------------------------------------------------------------------------------------------------ runs


def test_the_gate_of_lowest_divergence_is_kept(tmp_path):
    """`distil` is the one metric of which less is better; a rate that ruins the gate makes a later one worse."""
    stages = [{"loss": "kl", "steps": 4, "contexts": 2, "warmup": 1}, {"loss": "kl", "steps": 4, "warmup": 1, "rate": 30.0}]
    (summary,) = loop.train(
        small(stages=stages, selection={**SMALL["selection"], "sparsity": 0.97}, evaluate=[],
              validate={"every": 2, "contexts": 1, "metric": "distil"}), out=tmp_path
    )  # fmt: skip
    lines = [json.loads(x) for x in (tmp_path / "train" / "small" / "metrics.jsonl").read_text().splitlines()]
    seen = [line["held_out_distil"] for line in lines if "held_out_distil" in line]
    assert summary["best"] == pytest.approx(min(seen)) and 0 < min(seen) < max(seen)


def test_a_file_gives_a_gate_that_decodes(tmp_path):
    (summary,) = loop.train(SMALL, out=tmp_path)
    assert summary["steps"] == 7 and summary["total"] == 64 * 8 + 2 * 32 + 2 * 8 + 2 * 2
    (judged,) = summary["evaluate"]
    assert judged["items"] == 8 and judged["full"] == 1 and judged["gate"] >= 0.75
    gate = gates.load(summary["gate"])
    untrained = loop.make(config.read(SMALL)[1][""], models.load("tiny-recall"))
    assert any(np.abs(a - b).max() > 0 for a, b in zip(values(gate).values(), values(untrained).values()))
    assert loop.train(SMALL, out=tmp_path) == [summary], "a finished training is only read"


def test_the_base_is_untouched_unless_a_stage_is_joint(tmp_path, monkeypatch):
    load, model = models.load, models.load("tiny-recall")
    monkeypatch.setattr(models, "load", lambda name: model if name == model.name else load(name))  # the one that is trained on
    before = jax.tree.map(np.array, model.params)
    joint = small(name="joint", stages=[{"loss": "straight_through", "steps": 2, "warmup": 1, "joint": True}])
    plain, trained = loop.train(SMALL, out=tmp_path)[0], loop.train(joint, out=tmp_path)[0]
    assert not (tmp_path / "train/small/model").exists() and plain["total"] == trained["total"]
    served = models.load(str(tmp_path / "train/joint/model"))
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), served.params, before)
    assert all(jax.tree.leaves(changed))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), model.params, before)))


STOPS = {
    "in the first stage": (2, {}),
    "between the stages": (4, {}),
    "in the second": (6, {}),
    # nothing beats the first validation of a rate that grows nothing, so the first stage ends at its third step
    "where a stage ended early": (3, {"validate": {"every": 1, "contexts": 1, "patience": 2}, "rate": 0.0}),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_is_stopped_goes_on_to_the_same_losses(tmp_path, monkeypatch, name):
    stop, changes = STOPS[name]
    first = SMALL["stages"][0] | ({"rate": changes["rate"]} if "rate" in changes else {})
    table = small(stages=[first, SMALL["stages"][1]], validate=changes.get("validate", SMALL["validate"]))
    loop.train(table, out=tmp_path / "whole")
    save = Folder.save

    def killed(self, now, state):
        save(self, now, state)
        if now == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        loop.train(table, out=tmp_path / "cut")
    monkeypatch.undo()
    loop.train(table, out=tmp_path / "cut")
    lines = [
        [json.loads(x) for x in (tmp_path / d / "train/small/metrics.jsonl").read_text().splitlines()] for d in ("whole", "cut")
    ]
    for whole, cut in zip(*lines, strict=True):
        assert {k: v for k, v in whole.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in cut.items() if k != "seconds"}, abs=1e-6
        )


def test_a_stage_without_progress_ends_early_and_the_best_is_kept(tmp_path, monkeypatch):
    scores = iter([0.9, 0.1, 0.2, 0.3])
    monkeypatch.setattr(loop.Fit, "_recall_of", lambda self, index: {"recall": next(scores)})
    stage = {"loss": "kl", "steps": 100, "warmup": 1, "rate": 0.1}
    table = small(stages=[stage], validate={"every": 1, "contexts": 1, "patience": 2}, evaluate=[])
    (summary,) = loop.train(table, out=tmp_path)
    assert summary["steps"] == 3 and summary["best"] == pytest.approx(0.9)


def test_a_grid_trains_a_gate_for_every_combination(tmp_path):
    grid = {"seed": [0, 1], "stages": [{"label": "kl", "value": SMALL["stages"][:1]}]}
    made = loop.train(small(grid=grid, evaluate=[]), out=tmp_path)
    assert [m["label"] for m in made] == ["seed 0, stages kl", "seed 1, stages kl"]
    assert len({m["gate"] for m in made}) == 2 and made[0]["best"] != made[1]["best"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gate": {"kind": "spatil"}}, "kind='spatil'; allowed: spatial, lightning"),
        ({"gate": {"rnk": 4}}, "spatial has no option 'rnk'"),
        ({"gate": {"rank": 65}}, "rank: 1 … 64"),
        ({"data": {"contexts": 3}}, "no source; write texts = "),
        ({"data": SMALL["data"] | {"querys": 2}}, "unknown key 'querys'"),
        ({"data": SMALL["data"] | {"queries": 500}}, "positions for queries=500"),
        ({"validate": {"contexts": 5}}, "validate.contexts = 5 of data.contexts = 5"),
        ({"stages": []}, "stages: there are none"),
        ({"stages": [{"steps": 4}]}, "warmup = 10; allowed: 0 … 3"),
        ({"stages": [{"steps": 20, "joint": True}]}, "joint trains through the model"),
        ({"selection": {"granularity": "page"}}, "leave granularity out"),
        ({"selection": {"mode": "threshold"}}, "go together"),
        ({"selection": {"spars": 0.5}}, "no option 'spars'"),
    ],
)
def test_wrong_files_say_what_is_allowed(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        loop.train(small(**changes), out=tmp_path)


# ------------------------------------------------------------------------------------------------------- gates that ship


SHIPPED = {"tiny-recall": "train_gate_tiny_recall.toml", "smollm2-135m": "train_gate_smollm2.toml"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_gate_that_ships_has_its_file_its_log_and_few_parameters(name):
    """What is shipped beside the weights is what the experiment's file says today."""
    gate, folder = gates.load(name), gates.find(name).parent
    training = config.read(EXPERIMENTS / SHIPPED[name])[1][""]
    assert tomllib.loads((folder / f"{name}.toml").read_text()) == msgspec.json.decode(msgspec.json.encode(training))
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == training.steps and sum(gate.counts().values()) < 5_000
    assert gates.store.origin(name)["model"] == training.model == name


def test_the_gate_of_tiny_recall_answers_from_a_tenth():
    """Hard selection in the decode loop: at least 0.95 of the full cache's accuracy at sparsity 0.9 and L = 1,024."""
    model = models.load("tiny-recall")
    task, engine = Mqar(1024, 2, 64, 64), Engine(model)
    policy = parts.policy({"selection": {"name": "hysparse", "gate": "tiny-recall", "sparsity": 0.9, "sinks": 0, "recent": 1}})
    right = []
    for index in range(2):
        batch = task.batch(index, 5, model.tokenizer)
        session = engine.start(engine.prefill(batch.prompts), policy, batch.new_tokens, batch.rows, batch.forced)
        reads = session.run(batch.new_tokens, ["reads"]).reads
        assert np.asarray(reads).max() <= 103
        right += [model.tokenizer.decode(a) == t for a, t in zip(session.answers(), batch.targets)]
    assert np.mean(right) >= 0.95
