"""`kvlab bench kernels`: what can be checked of it without a GPU."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from kvlab import cli
from kvlab.bench.kernels import cases, figures, lower, picture, program, run, setting
from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.group import Group
from kvlab.bench.kernels.setting import SETTINGS, Setting, Sizes
from kvlab.errors import ConfigError

OWN = {"token_major", "head_major", "bicl_32", "bicl_64", "paged"}


def test_every_case_is_right_step_by_step_and_no_speed_is_claimed(tmp_path):
    asked = ["bench", "kernels", "--device", "cpu", "--dtype", "int8", "--out", str(tmp_path), "--json", str(tmp_path / "k.json")]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "k.json").read_text())
    own = [row for row in made["cases"] if row["layout"] in OWN]
    assert {(row["layout"], row["read"]) for row in own} == {(name, read) for name in OWN for read in ("dense", "pages")}
    assert all(row["error"] <= 1e-5 and row["reason"] is None for row in own)
    theirs = {row["layout"]: row for row in made["cases"] if row["layout"] not in OWN}
    assert len(theirs) == 4 and "cuDNN" in theirs["jax dot_product_attention cudnn"]["reason"]
    assert all(row["error"] <= 2e-2 for name, row in theirs.items() if "cudnn" not in name)
    assert all(row["ms"] is None and row["gb_s"] is None for row in made["cases"])
    assert made["copy_gb_s"] is None and [target["met"] for target in made["targets"]] == [None, None]
    assert json.loads((tmp_path / "kernels.json").read_text()) == made and (tmp_path / "env.json").exists()
    assert "nothing of speed" in done.output and not (tmp_path / "kernels.png").exists()


def few(monkeypatch, layouts, batch=2, **given):
    """A group of few layouts and no peers."""
    from kvlab.bench.kernels import peers

    monkeypatch.setattr(cases, "LAYOUTS", {name: cases.LAYOUTS[name] for name in layouts})
    monkeypatch.setattr(peers, "PEERS", ())
    return Group(Sizes(dataclasses.replace(SETTINGS["cpu"], **given), 192, batch, ("float32",)), lambda: False)


def test_a_kernel_that_is_wrong_is_named_and_ends_the_run(monkeypatch, capsys):
    group = few(monkeypatch, ["bicl_32"])
    true = cases.attend
    monkeypatch.setattr(cases, "attend", lambda *a: lambda cache, query, pages: true(*a)(cache, query, pages) * (1 + 1e-4))
    assert group.run() == Case("bicl_32", "dense", "float32", 192, 2)
    assert not group.seconds and "wrong" in group.reasons[group.cases[0]]
    monkeypatch.setattr(run, "Group", lambda sizes, late: group)
    done = CliRunner().invoke(cli.app, ["bench", "kernels", "--device", "cpu"])
    assert done.exit_code == 1 and "error: wrong: bicl_32, dense, float32" in done.output


def test_rounds_give_figures_and_what_fails_is_listed_with_its_reason(monkeypatch):
    group = few(monkeypatch, ["head_major", "paged"], cold=400_000, traffic=400_000, rounds=3)
    true = cases.policy
    monkeypatch.setattr(cases, "policy", lambda setting, case: 1 / 0 if case.layout == "paged" else true(setting, case))
    assert group.run() is None
    rows = figures.rows(group)
    dense, pages = (row for row in rows if row["layout"] == "head_major")
    assert all(row["reason"] == "ZeroDivisionError: division by zero" for row in rows if row["layout"] == "paged")
    kv = 2 * 2 * 2 * 192 * 64 * 4  # keys and values, rows, heads, tokens, channels, bytes
    assert dense["gb_s"] == pytest.approx(kv / dense["ms"] / 1e6) and pages["gb_s"] == pytest.approx(kv / 3 / pages["ms"] / 1e6)
    assert len(group.seconds["copy"]) == 3 and figures.roofs([group.seconds])["copy_gb_s"] > 0
    assert picture.figure({"cases": rows, **figures.roofs([group.seconds])}).axes


def test_nothing_is_read_twice_before_enough_else_was():
    sizes = Setting("triton", 8, 4, 128, cold=100, traffic=1000)
    assert (
        program.sizes(sizes, 30, 1) == (4, 9)
        and program.sizes(sizes, 30, 16) == (4, 144)
        and program.sizes(sizes, 5000, 1) == (1, 1)
    )
    lists = cases.lists(Setting("triton", 2, 4, 64), 64 * 40, 3)
    assert lists.shape == (20, 3, 2, 2) and (np.diff(lists) > 0).all()
    assert all(sorted(lists[:, b, h].ravel()) == list(range(40)) for b in range(3) for h in range(2))


def row(layout, ms, share, length=131_072, read="dense", dtype="bfloat16", batch=1):
    return {"layout": layout, "read": read, "dtype": dtype, "length": length, "batch": batch, "ms": ms, "fraction_of_copy": share}


def test_targets_are_of_kvlabs_best_layout_where_it_does_worst():
    jax_own = "jax pallas paged_attention"
    rows = [row("bicl_64", 2.0, 0.7), row("paged", 1.5, 0.9), row("token_major", 1.0, 0.99), row(jax_own, 1.8, 0.8)]
    met = {target["name"]: (target["value"], target["met"]) for target in figures.summary(rows)["targets"]}
    assert met == {"fraction_of_copy": (0.9, True), "over_best_of_jax": (1.5 / 1.8, True)}
    rows += [row("bicl_64", 3.0, 0.6, batch=8), row(jax_own, 2.0, 0.8, batch=8), row("paged", 9.0, 0.1, length=8192)]
    made = figures.summary(rows)
    assert made["over_best_of_jax"] == 1.5 and made["best_of_jax_ms"] == 2.0 and len(made["beside_jax"]) == 2
    assert [target["met"] for target in made["targets"]] == [False, False]


def test_the_time_limit_leaves_every_case_listed(monkeypatch):
    monkeypatch.setattr(cases, "LAYOUTS", {"paged": cases.LAYOUTS["paged"]})
    made = run.main("cpu", limit=0.0, dtype=["int8"])
    assert made["stopped_by_time_limit"] and len(made["cases"]) == 6
    assert all("time limit" in row["reason"] and row["error"] is None for row in made["cases"])


def test_a_gpu_that_is_not_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["kvlab", "bench", "kernels"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith("error: --device gpu: jax finds no NVIDIA GPU") and said.count("\n") == 1
    with pytest.raises(ConfigError, match="allowed: gpu, cpu"):
        setting.device("tpu")


def test_what_is_timed_lowers_for_a_gpu():
    small = dataclasses.replace(SETTINGS["gpu"], cold=0, traffic=0, rounds=0)
    for name in ("token_major", "bicl_32"):
        assert lower.MARK in lower.text_of(small, Case(name, "pages", "int8", 1024, 1))
    with jax.default_matmul_precision("highest"):
        assert lower.MARK in lower.text_of(small, Case("jax pallas decode_attention", "dense", "bfloat16", 1024, 1))
