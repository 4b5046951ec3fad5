"""From a config file to a table: strictness, resuming, results, exit codes. Runs on a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tomli_w

import kvlab
from kvlab import cli, gates
from kvlab.codec import Raw
from kvlab.decode import Prefilled
from kvlab.errors import ConfigError, KvlabError, RefusedPolicy, ResultsError
from kvlab.experiment import compare, config, decoded, environment, group, report
from kvlab.experiment.report import TIME_COLUMNS
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import KeepAll, KVzip
from kvlab.selection import ReadAll
from tests import tools

SMALL = {
    "name": "small",
    "question": "does it run?",
    "base": {"model": {"name": "tiny"}, "seed": 3},
    "grid": {
        "task": [
            {"name": "needle", "length": 300, "contexts": 2, "needles": 2, "new_tokens": 6, "text": "stdlib"},
            {"name": "likelihood", "length": 128, "contexts": 2, "continuation": 8, "text": "stdlib"},
        ],
        "policy": [
            {"label": "full"},
            {"retention": {"name": "window", "size": 60, "sinks": 4}},
            {"codec": {"k": {"name": "int8", "scale": "channel"}, "v": "int8"}},
        ],
    },
}


def without_times(frame):
    return frame.drop(columns=[c for c in TIME_COLUMNS if c in frame])


def test_an_experiment_gives_a_table_a_picture_and_samples(on_tiny, tmp_path, capsys):
    prefills = []
    real = group.Engine.prefill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.Engine, "prefill", lambda self, *args: prefills.append(1) or real(self, *args))
        frame = kvlab.run(SMALL, out=tmp_path)
    assert len(prefills) == 3, "one prefill per batch serves every policy"
    assert list(frame["policy"]) == ["full", "window size 60 sinks 4", "K int8 channel / V int8"]
    full = frame.iloc[0]
    assert full["kl_mean"] == 0 and full["same_top1"] == 1 and full["delta_nll"] == 0
    assert frame["kl_mean"].iloc[1] > 0 and frame["resident_bytes"].iloc[1] < full["resident_bytes"]
    assert {"accuracy", "kl_99_9", "tokens_per_s", "ms_per_token_p99", "time_to_first_token"} <= set(frame)
    assert "does it run?" in capsys.readouterr().out
    folder = tmp_path / "small"
    assert (folder / "small.png").stat().st_size > 5000 and len(pd.read_parquet(folder / "table.parquet")) == 6
    for run in folder.glob("*/config.toml"):
        assert {"env.json", "metrics.jsonl", "samples", "summary.json"} <= {p.name for p in run.parent.iterdir()}


def test_results_show_what_survived_and_in_which_words(on_tiny, tmp_path):
    kvlab.run(SMALL, out=tmp_path)
    samples = kvlab.results.load(tmp_path / "small")
    row = samples[(samples.policy == "window size 60 sinks 4") & (samples.task == "needle")].iloc[0]
    positions = row["kept_positions"][1][0]
    assert positions.tolist() == [0, 1, 2, 3, *range(240, 300)]
    assert len(row["kept_tokens"][1][0]) == len(positions)
    assert row["entropy"].shape[1:] == (2, 2, 3) and len(row["entropy_steps"]) == len(row["entropy"]) and row["entropy"].max() > 0
    kept = kvlab.results.load(tmp_path / "small", "kept")
    text = kept[(kept.policy == "full") & (kept.task == "needle")].iloc[0]
    assert "magic number" in "".join(text["kept_tokens"])
    entropy = kvlab.results.load(tmp_path / "small", "entropy")
    assert {"layer", "kv_head", "query_head", "step", "entropy"} <= set(entropy)
    drift = kvlab.results.load(tmp_path / "small", "drift").groupby(["policy", "layer"])["drift"].mean().unstack("layer")
    assert drift.shape == (3, 2) and (drift.loc["full"] == 0).all() and (drift.loc["window size 60 sinks 4"] > 0.01).all()
    assert len(kvlab.results.load(tmp_path / "small", "cells")) == 6
    with pytest.raises(ResultsError, match="holds no runs"):
        kvlab.results.load(tmp_path)


def test_verdicts_stand_beside_the_figures(on_tiny, tmp_path, capsys):
    """A random model finds nothing: no discordant pair, so the intervals must stay open; its window changes likelihoods."""
    frame = kvlab.run({**SMALL, "verdict": {"accuracy_margin": 0.02, "alpha": 0.1}}, out=tmp_path).set_index("policy")
    full, window = frame.loc["full"], frame.loc["window size 60 sinks 4"]
    assert list(frame["verdict"]) == ["reference", "underpowered", "underpowered"] and full["nll_verdict"] == "reference"
    assert (full["accuracy_difference"], full["accuracy_difference_low"], full["items_needed"]) == (0, 0, 0)
    assert window["accuracy_difference_low"] < -0.5 and window["accuracy_difference_high"] > 0.5
    assert window["accuracy_low"] <= window["accuracy"] < window["accuracy_high"] and window["items_needed"] > 100
    assert window["delta_nll_low"] < window["delta_nll"] < window["delta_nll_high"] and window["documents_needed"] > 2
    t = 3.0776835  # Student's with one degree of freedom, at 0.9: two documents
    rows = kvlab.results.load(tmp_path / "small").query("policy == 'window size 60 sinks 4' and task == 'likelihood'")
    means = np.array([np.mean(np.subtract(r["nll"], r["nll_reference"])) for _, r in rows.iterrows()])
    assert window["delta_nll_high"] - window["delta_nll"] == pytest.approx(t * means.std(ddof=1) / np.sqrt(2), rel=1e-4)
    shown = " ".join(capsys.readouterr().out.split())
    assert "underpowered (needs " in shown and "[low, high]: 80% intervals" in shown and "under 0.02 of accuracy" in shown


def test_an_accuracy_verdict_pairs_the_same_samples():
    full, window = (config.Cell({"name": "m"}, {"name": "needle"}, policy) for policy in ({}, {"codec": "int8"}))
    assert compare.is_full(full) and not compare.is_full(window)
    assert compare.is_full(config.Cell({}, {}, {"label": "by another name", "codec": {"name": "raw"}}))
    layers = (config.LayerOverride((0, 1), {"codec": "int8"}),)
    assert not compare.is_full(config.Cell({}, {}, {"label": "full"}, layers))
    keys = [(full.group, batch, i) for batch in range(20) for i in range(10)]
    theirs = {key: {"correct": True, "context": key[1]} for key in keys}
    mine = {key: {"correct": key[2] < 7, "context": key[1]} for key in reversed(keys)}
    made = compare.accuracy(mine, theirs, False, config.Margins(accuracy_margin=0.1))
    assert made["verdict"] == "fail" and made["accuracy_difference"] == pytest.approx(-0.3)
    elsewhere = config.Cell({"name": "m"}, {"name": "passkey"}).group
    other = compare.accuracy({(elsewhere, 0, 0): {"correct": True}}, theirs, False, config.Margins())
    assert other["verdict"] == "no reference" and np.isnan(other["accuracy_difference"])


def test_contexts_of_one_seed_are_one_cluster_at_any_length():
    make = lambda length, seed: config.Cell({"name": "m"}, {"name": "needle", "length": length}, {}, (), seed).group
    groups = [make(length, seed) for seed in (0, 1) for length in (512, 1024)]
    found = compare.clusters({(name, batch, 0): {"context": batch} for name in groups for batch in range(3)})
    assert len(found) == 12 and len(set(found.values())) == 6


def test_without_a_full_cache_there_are_intervals_and_no_verdicts(on_tiny, tmp_path):
    """One document, so its interval is infinite, which JSON cannot say."""
    tasks = [{**task, "contexts": 1} for task in SMALL["grid"]["task"]]
    frame = kvlab.run({**SMALL, "grid": {"task": tasks, "policy": SMALL["grid"]["policy"][1:2]}}, out=tmp_path)
    assert {"accuracy_low", "delta_nll_high"} <= set(frame) and not {"verdict", "nll_verdict", "items_needed"} & set(frame)
    assert frame["delta_nll_high"].iloc[0] == np.inf
    assert report.as_json(frame)["policies"]["window size 60 sinks 4"]["delta_nll_high"] is None


def test_finished_batches_are_not_computed_again(on_tiny, tmp_path, monkeypatch):
    """CASES 31: after a crash in the middle, the config and finished samples are there and are used."""
    small = {**SMALL, "grid": {**SMALL["grid"], "policy": SMALL["grid"]["policy"][:2]}}
    whole = kvlab.run(small, out=tmp_path / "a")
    calls = []
    real = group.decode

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(group, "decode", failing)
    with pytest.raises(KeyboardInterrupt):
        kvlab.run(small, out=tmp_path / "b")
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "b").glob("*/*/samples/*.json")}
    assert done and all((p.parents[1] / "config.toml").exists() for p in done)
    again = kvlab.run(small, out=tmp_path / "b")
    assert all(p.stat().st_mtime_ns == t for p, t in done.items())
    pd.testing.assert_frame_equal(without_times(whole), without_times(again))


def test_other_code_refuses_to_build_on_old_results(on_tiny, tmp_path, monkeypatch):
    small = {**SMALL, "grid": {"task": SMALL["grid"]["task"][1:]}}
    kvlab.run(small, out=tmp_path)
    monkeypatch.setattr(environment, "code_digest", lambda: "f" * 64)
    with pytest.raises(ResultsError, match="other code.*--accept-stale"):
        kvlab.run(small, out=tmp_path)
    kvlab.run(small, out=tmp_path, accept_stale=True)
    kvlab.run(small, out=tmp_path, fresh=True)


def test_a_rule_of_ones_own_runs_by_import_path(on_tiny, tmp_path):
    """`EveryThird` stands in this file; the experiment names it, and nothing in kvlab knows it."""
    rule = {"name": "tests.my_rule:EveryThird", "size": 64}
    small = {**SMALL, "grid": {**SMALL["grid"], "policy": [{"label": "full"}, {"retention": rule}]}}
    frame = kvlab.run(small, out=tmp_path)
    assert frame["policy"].iloc[1] == "EveryThird size 64"
    assert frame["resident_bytes"].iloc[1] < frame["resident_bytes"].iloc[0]


def test_prompts_are_recorded_with_what_the_policies_of_a_group_need(on_tiny, tmp_path):
    """A gate beside a replay beside the full cache, from one prefill."""
    path = str(tmp_path / "gate.safetensors")
    gates.save(gates.make("importance", gates.ImportanceConfig(2, 2, 16, 48, 8)), path)
    rules = [{"name": "gated", "gate": path, "ratio": 0.5}, {"name": "kvzip", "ratio": 0.5}]
    policies = [{"label": "full"}, *({"label": rule["name"], "retention": rule} for rule in rules)]
    small = {**SMALL, "grid": {"task": SMALL["grid"]["task"][:1], "policy": policies}}
    frame = kvlab.run(small, out=tmp_path)
    assert (frame["resident_bytes"].iloc[1:] < 0.7 * frame["resident_bytes"].iloc[0]).all()


def test_a_replay_counts_in_the_time_of_those_who_asked_for_it():
    prompt = Prefilled([[1]], (), None, seconds=1.0, replay_seconds=5.0)
    first = {}
    for rule in (KVzip(ratio=0.5), KeepAll()):
        policies = [Policy(rule, Raw(), Contiguous(), ReadAll())]
        session = SimpleNamespace(step_seconds=[(1.0, 1)], fill_seconds=0.5, policies=policies)
        first[type(rule).__name__] = decoded.timing(session, prompt, 1)["time_to_first_token"]
    assert first == {"KVzip": 6.5, "KeepAll": 1.5}


def test_layers_may_have_policies_of_their_own(on_tiny, tmp_path):
    base = {**SMALL["base"], "layers": [{"range": [1, 1], "policy": {"retention": {"name": "window", "size": 60}}}]}
    frame = kvlab.run({**SMALL, "base": base, "grid": {"task": SMALL["grid"]["task"][:1]}}, out=tmp_path)
    assert "1–1: window" in frame["policy"].iloc[0]
    kept = kvlab.results.load(tmp_path / "small", "kept").groupby("layer")["kept_positions"].first()
    assert len(kept[0]) == 300 and len(kept[1]) == 64


@pytest.mark.parametrize(
    "change,message",
    [
        ({"grids": {}}, "unknown key 'grids'; did you mean 'grid'"),
        ({"verdict": {"acuracy_margin": 0.1}}, "verdict: unknown key 'acuracy_margin'; did you mean 'accuracy_margin'"),
        ({"verdict": {"alpha": "0.05"}}, "Expected `float`, got `str`"),
        ({"verdict": {"nll_margin": 0}}, "nll_margin > 0"),
        ({"base": {"modle": {}}}, "unknown key 'modle'; did you mean 'model'"),
        ({"grid": {"task": [{"name": "needel"}]}}, "no 'needel'; did you mean 'needle'"),
        ({"grid": {"task": [{"name": "needle", "lenght": 9}]}}, "no option 'lenght'; did you mean 'length'"),
        ({"grid": {"task": [{"name": "needle", "length": "long"}]}}, "Expected `int`, got `str`"),
        ({"grid": {"task": [{"name": "needle", "length": 2.5}]}}, "Expected `int`, got `float`"),
        ({"grid": {"task": [{"name": "needle"}], "policy.retention": [{"name": "windw"}]}}, "did you mean 'window'"),
        (
            {"grid": {"task": [{"name": "needle"}], "policy.codec": [{"name": "int8", "scale": "row"}]}},
            "allowed: channel, tensor, token",
        ),
        ({"grid": {"task": [{"name": "needle"}], "policy.coder": ["raw"]}}, "unknown key 'coder'; did you mean 'codec'"),
        ({"grid": {"task": [{"name": "needle"}], "policy.retention": ["no.such:Part"]}}, "cannot be imported"),
        ({"zip": {"seed": [1, 2], "policy.label": ["a"]}}, "lists of different lengths"),
    ],
)
def test_wrong_configs_say_what_is_right(change, message):
    with pytest.raises(ConfigError, match=message):
        config.expand(config.read({**SMALL, **change})[1])


def test_refused_products_are_refused_before_anything_runs():
    policy = {"retention": {"name": "tests.tools:KeyNorm"}, "codec": {"name": "int8", "scale": "channel"}}
    with pytest.raises(RefusedPolicy, match="replaces single tokens"):
        config.expand(config.read({**SMALL, "grid": {"task": [{"name": "needle"}], "policy": [policy]}})[1])


def test_overrides():
    experiment = config.read(SMALL)[1]
    cells = config.expand(experiment, ["task.needles=1", "seed=9", "task.contexts=1"])
    assert {c.task.get("needles") for c in cells} == {1, None} and {c.seed for c in cells} == {9}
    assert {c.task["contexts"] for c in cells} == {1}
    with pytest.raises(ConfigError, match="no task here has the option 'neddles'; did you mean 'needles'"):
        config.expand(experiment, ["task.neddles=1"])
    with pytest.raises(ConfigError, match="write --set"):
        config.expand(experiment, ["nonsense"])


def test_the_same_config_has_the_same_id():
    a, b = (config.expand(config.read(SMALL)[1]) for _ in range(2))
    assert [c.run_id for c in a] == [c.run_id for c in b] and len({c.run_id for c in a}) == len(a)


# ------------------------------------------------------------------------------------------------ the command line


def command(*args, cwd, **env):
    """Runs the command line with model "tiny" patched in."""
    starter = textwrap.dedent(
        """
        import sys
        from kvlab import cli, results
        from kvlab.experiment import group
        from tests import tools
        model = tools.tiny_model()
        group.load = lambda name: model
        cli.main()
        """
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu", **env}
    return subprocess.Popen(
        [sys.executable, "-c", starter, *map(str, args)],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def write_small(folder, small=SMALL):
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps({k: v for k, v in small.items() if k != "name"}))
    return path


def test_kill_and_run_again(on_tiny, tmp_path):
    """kill −9 in the middle, run again: nothing finished is recomputed and the frame equals an undisturbed run's."""
    task = {**SMALL["grid"]["task"][0], "contexts": 4, "needles": 1, "new_tokens": 2}
    file = write_small(tmp_path, {**SMALL, "grid": {"task": [task], "policy": SMALL["grid"]["policy"][:2]}})
    process = command("run", file, "--out", tmp_path / "killed", cwd=tmp_path)
    deadline = time.time() + 300
    while not list((tmp_path / "killed").glob("*/*/samples/*.json")):
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "killed").glob("*/*/samples/*.json")}
    assert not all((p.parents[1] / "summary.json").exists() for p in done), "it had finished before it was killed"
    again = command("run", file, "--out", tmp_path / "killed", "--json", tmp_path / "again.json", cwd=tmp_path)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert all(p.stat().st_mtime_ns == t for p, t in done.items())
    whole = kvlab.run(file, out=tmp_path / "whole")
    rows = json.loads((tmp_path / "again.json").read_text())["policies"]
    for _, row in without_times(whole).iterrows():
        for column, value in row.drop("policy").items():
            expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-9)
            assert rows[row["policy"]][column] == expected, column


@pytest.mark.parametrize(
    "args,message",
    [
        (["run", "missing.toml"], "No such file"),
        (["run", "small.toml", "--set", "task.length=99999"], "tokens"),
        (["run", "small.toml", "--set", "policy.codec.nam=raw"], "no name"),
        (["run", "small.toml", "--out", "/proc/kvlab"], "cannot write"),
        (["fetch", "smolm2-135m"], "did you mean 'smollm2-135m'"),
        (["fetch", "missing.gguf"], "no file missing.gguf"),
        (["fetch", "broken.gguf"], "no readable GGUF"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(on_tiny, tmp_path, monkeypatch, capsys, args, message):
    write_small(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["kvlab", *args])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and len(lines) == 1 and message in lines[0], errors


def test_bad_input_in_a_process_of_its_own(tmp_path):
    process = command("run", "missing.toml", cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2 and errors.startswith("error: ") and len(errors.splitlines()) == 1


def test_a_full_disk_is_said_and_keeps_what_is_finished(on_tiny, tmp_path, monkeypatch):
    from kvlab.experiment import store

    kvlab.run({**SMALL, "grid": {**SMALL["grid"], "policy": [{"label": "full"}]}}, out=tmp_path)
    before = sorted(tmp_path.glob("*/*/samples/*.json"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.np, "savez_compressed", full)
    with pytest.raises(ResultsError, match="No space left.*finished batches are kept"):
        kvlab.run(SMALL, out=tmp_path)
    assert sorted(tmp_path.glob("*/*/samples/*.json")) == before and not list(tmp_path.glob("**/*.part"))


def test_importing_kvlab_is_light():
    code = "import sys, kvlab; print([m for m in ('jax', 'pandas', 'matplotlib', 'flax', 'tokenizers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert issubclass(RefusedPolicy, KvlabError) and tools.PAGE == 64
