"""Training: strict files, gradients, runs that are killed and go on; and the model that ships."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
from safetensors import safe_open

from kvlab import cli, models, parts
from kvlab.decode import Engine
from kvlab.errors import ConfigError, ResultsError
from kvlab.experiment.config import Cell
from kvlab.models.fetch import BUILTIN
from kvlab.tasks import Mqar
from kvlab.tasks.mqar import KEYS, NOISE, VALUES, WORDS, sample
from kvlab.train import config, evaluate, forward, init, loop, step, store

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SMALL = {
    "name": "small",
    "question": "does it train?",
    "seed": 3,
    "log": 1,
    "save": 4,
    "model": {"layers": 2, "hidden": 32, "ffn": 16, "heads": 4, "kv_heads": 2, "head_dim": 16, "context": 64},
    "optimiser": {"rate": 1e-2, "warmup": 2},
    "stages": [
        {"steps": 8, "rows": 4, "length": 12, "pairs": 3, "queries": 3},
        {"steps": 8, "rows": 2, "length": 20, "pairs": 4, "queries": 2},
    ],
    "evaluate": [{"length": 16, "pairs": 4, "queries": 4, "contexts": 2}],
    "smoke": {"stages.0.steps": 2, "stages.1.steps": 1, "optimiser.warmup": 1},
}


# ------------------------------------------------------------------------------------------------------------ the task


def test_contexts_hold_each_pair_once_and_targets_are_the_values():
    drawn = sample(np.random.default_rng(0), 5, 100, 30, 20)
    for context, queries, targets, starts in zip(*drawn):
        kinds = np.searchsorted([NOISE, NOISE + KEYS], context, "right")
        assert (np.bincount(kinds, minlength=3) == [40, 30, 30]).all()
        assert len(set(context[kinds == 1])) == 30 and len(set(queries)) == 20
        for query, target, start in zip(queries, targets, starts):
            assert context.tolist().index(query) == start
            assert context[start + 1] == target >= NOISE + KEYS


def test_pairs_lie_anywhere_and_all_words_occur():
    drawn = sample(np.random.default_rng(0), 400, 40, 5, 5)
    assert set(drawn.start_BQ.ravel()) == set(range(39)), "first and last places included"
    assert set(drawn.context_BT.ravel()) == set(range(len(WORDS)))
    assert len(WORDS) == NOISE + KEYS + VALUES == len(set(WORDS))


@pytest.mark.parametrize(
    "table, message",
    [
        ({"length": 20, "pairs": 11}, "pairs=11; allowed: 1 … 10"),
        ({"pairs": 97}, "allowed: 1 … 96"),
        ({"pairs": 4, "queries": 5}, "queries=5; allowed: 1 … 4"),
        ({"contexts": 0}, "contexts=0"),
    ],
)
def test_tasks_that_cannot_be_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        Mqar(**table)


def test_another_vocabulary_is_refused(tiny):
    with pytest.raises(ConfigError, match="vocabulary.*tiny-recall"):
        Mqar().batch(0, 0, tiny.tokenizer)


# ----------------------------------------------------------------------------------------------------------- the file


def changed(**changes):
    return {**SMALL, **changes}


def as_file(path, **changes):
    path.write_text(tomli_w.dumps({k: v for k, v in changed(**changes).items() if k != "name"}))
    return path


@pytest.mark.parametrize(
    "table, message",
    [
        (changed(optimizer={}), "unknown key 'optimizer'; did you mean 'optimiser'"),
        (changed(optimiser={"rat": 1.0}), "small: optimiser: unknown key 'rat'; did you mean 'rate'"),
        (changed(model={"head": 3}), "model: unknown key 'head'; did you mean 'head"),
        (changed(stages=[{**SMALL["stages"][0], "row": 1}]), "stages.0: unknown key 'row'; did you mean 'rows'"),
        (changed(stages=[{**SMALL["stages"][0], "steps": "many"}]), "stages.0: Expected `int`"),
        (changed(stages=[]), "stages: there are none"),
        (changed(stages=[{**SMALL["stages"][0], "steps": 0}]), "stages.0.steps = 0; allowed: more than 0"),
        (changed(stages=[{**SMALL["stages"][0], "length": 62}]), "exceed model.context=64"),
        (changed(evaluate=[{"known": True}]), "evaluate: known = true; here keys are asked for"),
        (changed(evaluate=[{"lenght": 3}]), "evaluate: mqar has no option 'lenght'; did you mean 'length'"),
        (changed(optimiser={"warmup": 16}), "warmup = 16; allowed: 0 … 15"),
        (changed(model={**SMALL["model"], "heads": 3, "kv_heads": 2}), "multiple of kv_heads"),
        ({"name": "x", "stages": SMALL["stages"]}, "question"),
    ],
)
def test_a_wrong_file_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        config.read(table)


def test_overrides_reach_stages_and_bad_ones_are_named():
    overrides = ["stages.1.steps=5", "optimiser.rate=0.5", "seed=7"]
    name, training = config.read(SMALL, overrides)
    assert (name, training.steps, training.optimiser.rate, training.seed) == ("small", 13, 0.5, 7)
    assert config.read(SMALL, smoke=True)[1].steps == 3
    assert [training.stage(now)[0] for now in (1, 8, 9, 13)] == [1, 1, 2, 2]
    for override, message in (("stages.2.steps=5", "allowed: 0 … 1"), ("seed.x=1", "nothing"), ("seed", "write --set")):
        with pytest.raises(ConfigError, match=message):
            config.read(SMALL, [override])


def test_the_file_of_the_shipped_model_reads_small_and_whole():
    for smoke, most in ((False, 400), (True, 25)):
        name, training = config.read(EXPERIMENTS / "tiny_recall.toml", smoke=smoke)
        assert name == "tiny_recall" and training.steps <= most and training.expect
    assert training.shape() == models.load("tiny-recall").config


def test_the_command_line_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    file = as_file(tmp_path / "wrong.toml", sed=1)
    for argument, message in ((file, "did you mean 'seed'"), (tmp_path / "none.toml", "give the path")):
        monkeypatch.setattr(sys, "argv", ["kvlab", "train", str(argument), "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error and error.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------ the steps


def test_every_parameter_gets_a_gradient():
    training = config.read(SMALL)[1]
    params = init.parameters(training.shape(), 0)
    data = step.batch(training.stages[0], 0, 1)
    gradient = jax.jit(jax.grad(lambda p: step.loss(p, training.shape(), data)[0]))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, jax.tree_util.keystr(path)
    for i in (0, 1):
        assert (np.abs(gradient["blocks"][i]["qkv"]).max(1) > 0).all(), "each row of every query, key and value head"


def test_the_differentiable_forward_is_what_prefill_and_decode_compute():
    """Questions apart from one another, by a mask, against one decoded after the other from the same filled cache."""
    training = config.read(SMALL)[1]
    shape = training.shape()
    model = models.Model("small", shape, init.parameters(shape, 0), None, "")
    drawn = sample(np.random.default_rng(1), 1, 40, 6, 5)
    engine = Engine(model)
    session = engine.start(engine.prefill(drawn.context_BT.tolist()), parts.policy({}), 1, [0] * 5, drawn.query_BQ.T.tolist())
    decoded = session.run(1, ("logits",)).logits[0]
    compiled = lambda way: jax.jit(way, static_argnums=0)(shape, model.params, drawn.context_BT, drawn.query_BQ)[0]
    apart, one_by_one = compiled(forward.apart), compiled(forward.sequential)
    np.testing.assert_allclose(apart, decoded, atol=2e-4)
    np.testing.assert_allclose(one_by_one[0], apart[0], atol=2e-4)
    assert np.abs(one_by_one[-1] - apart[-1]).max() > 1e-3, "later questions see earlier ones"


def test_loss_falls_and_the_export_loads(tmp_path, capsys):
    long = {"stages": [{"steps": 80, "rows": 32, "length": 8, "pairs": 2, "queries": 2}]}
    summary = loop.train({**changed(log=10, save=80), **long}, out=tmp_path)
    folder = tmp_path / "train" / "small"
    lines = read_log(folder)
    assert [line["step"] for line in lines] == list(range(10, 81, 10))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert summary["loss"] == lines[-1]["loss"]
    assert {p.name for p in folder.iterdir()} >= {"config.toml", "env.json", "metrics.jsonl", "model", "summary.json"}
    model = models.load(str(folder / "model"))
    assert loop.count(model.params) == summary["parameters"] and model.config == config.read(SMALL)[1].shape()
    assert summary["evaluate"][0]["queries"] == 8 and summary["evaluate"][0]["agreement"] == 1
    assert loop.train({**changed(log=10, save=80), **long}, out=tmp_path) == summary, "a finished training is only read"
    (folder / "summary.json").unlink()
    assert loop.train({**changed(log=10, save=80), **long}, out=tmp_path) == summary, "evaluated again after a kill at the end"
    with pytest.raises(ResultsError, match="another config; --fresh"):
        loop.train(SMALL, out=tmp_path)
    (folder / "env.json").write_text(json.dumps({"code": "f" * 64}))
    with pytest.raises(ResultsError, match="other code.*--accept-stale"):
        loop.train({**changed(log=10, save=80), **long}, out=tmp_path)
    assert loop.train({**changed(log=10, save=80), **long}, out=tmp_path, accept_stale=True) == summary


def read_log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


KILLED = """
import os, signal, sys
from kvlab import cli
from kvlab.train.store import Folder

def log_and_die(self, line, log=Folder.log):
    log(self, line)
    if line["step"] == 11:
        os.kill(os.getpid(), signal.SIGKILL)

Folder.log = log_and_die
cli.main()
"""


def test_a_killed_training_goes_on_as_if_undisturbed(tmp_path):
    """kill -9 after step 11 of 16; the last checkpoint is of step 8, so steps 9 and later are run again."""
    file = as_file(tmp_path / "small.toml", evaluate=[])
    loop.train(file, out=tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, "train", str(file), "--out", str(tmp_path / "cut")]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    folder = tmp_path / "cut" / "train" / "small"
    assert [line["step"] for line in read_log(folder)] == list(range(1, 12))
    assert (folder / "config.toml").exists() and not (folder / "summary.json").exists()
    with open(folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 99, "lo')  # a line that the kill cut off
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.step, "batch", lambda *a, real=step.batch: ran.append(a[-1]) or real(*a))
        loop.train(file, out=tmp_path / "cut")
    assert ran == list(range(9, 17))
    whole, cut = read_log(tmp_path / "whole" / "train" / "small"), read_log(folder)
    assert [line["step"] for line in cut] == list(range(1, 17))
    np.testing.assert_allclose([x["loss"] for x in cut], [x["loss"] for x in whole], rtol=0, atol=1e-6)


def test_a_checkpoint_restores_every_leaf(tmp_path):
    training = config.read(SMALL)[1]
    rule = step.adamw(training.optimiser, training.steps)
    params = init.parameters(training.shape(), 0)
    state, _, _ = step.compiled(training.shape(), rule)(
        step.State(params, rule.init(params)), step.batch(training.stages[0], 0, 1)
    )
    with store.Folder(tmp_path / "x", training, {}) as folder:
        folder.save(1, state)
    with store.Folder(tmp_path / "x", training, {}) as folder:
        other = init.parameters(training.shape(), 1)
        found, restored = folder.restore(step.State(other, rule.init(other)))
    assert found == 1
    jax.tree.map(np.testing.assert_array_equal, restored, state)


# ----------------------------------------------------------------------------------------------------- the shipped model


@pytest.fixture(scope="module")
def recall():
    return Engine(models.load("tiny-recall"))


def test_the_shipped_model_is_small_and_reads_words(recall):
    model = recall.model
    assert (BUILTIN["tiny-recall"] / "model.safetensors").stat().st_size < 4e6
    assert loop.count(model.params) < 1e6
    with safe_open(BUILTIN["tiny-recall"] / "model.safetensors", "numpy") as file:
        assert "model.layers.1.self_attn.q_proj.weight" in file.keys()
    shape = model.config
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 64)
    assert model.tokenizer.encode("k17 v20 n5") == [WORDS.index(w) for w in ("k17", "v20", "n5")]
    assert model.tokenizer.decode([0, NOISE, len(WORDS) - 1]) == f"n0 k0 v{VALUES - 1}"
    assert model.tokenizer.strings(range(len(WORDS))) == WORDS


@pytest.mark.parametrize("length, pairs, contexts, least", [(128, 32, 10, 0.99), (1024, 64, 1, 0.95)])
def test_the_shipped_model_recalls_through_a_cache(recall, length, pairs, contexts, least):
    figures = evaluate.figures(recall, Mqar(length, contexts, pairs, pairs), seed=17)
    assert figures["queries"] == contexts * pairs
    assert figures["accuracy_cache"] >= least, figures
    assert abs(figures["accuracy"] - figures["accuracy_cache"]) <= 1 / figures["queries"], figures


def test_what_a_window_forgot_is_not_recalled(recall, tmp_path):
    """The task in an experiment: full cache and a window of a third of the context."""
    import kvlab

    table = {
        "name": "recall",
        "question": "what does a window forget?",
        "base": {"model": {"name": "tiny-recall"}, "task": {"name": "mqar", "length": 128, "contexts": 2, "pairs": 32}},
        "grid": {"policy": [{"label": "full"}, {"label": "window", "retention": {"name": "window", "size": 40}}]},
    }
    frame = kvlab.run(table, out=tmp_path).set_index("policy")
    assert frame.accuracy["full"] >= 0.98
    samples = kvlab.results.load(tmp_path / "recall")
    cut = samples[samples.policy == "window"]
    inside, outside = cut[cut.depth > 1 - 32 / 128], cut[cut.depth < 1 - 44 / 128]
    assert len(inside) > 5 and len(outside) > 20
    assert inside.correct.mean() >= 0.98 and outside.correct.mean() < 0.1
    assert Cell(model={"name": "tiny-recall"}, task={"name": "mqar"}).make_task() == Mqar()
