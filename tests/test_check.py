"""`kvlab check`: the rules on made-up samples, the controls, and a whole check of a tiny random model."""

import json

import numpy as np
import pytest
from junitparser import Error, Failure, JUnitXml

from kvlab import cli
from kvlab.decode import Engine
from kvlab.errors import ConfigError
from kvlab.experiment import compare, config, run
from kvlab.experiment.regression import check, judge
from kvlab.report import data, verdicts
from kvlab.tasks import Answers, Continuation
from kvlab.tasks.continuation import agreed, repetition
from tests.tools import Bytes

MARGINS, RULES = config.Margins(), config.Rules()
SMALL = {
    "name": "small",
    "question": "does it hurt?",
    "base": {"model": {"name": "tiny"}, "policy": {"retention": {"name": "window", "size": 60, "sinks": 4}}},
    "grid": {
        "task": [
            {"name": "needle", "length": 600, "contexts": 2, "needles": 2, "new_tokens": 3, "text": "stdlib"},
            {"name": "likelihood", "length": 128, "contexts": 2, "continuation": 8, "text": "stdlib"},
            {"name": "continuation", "length": 128, "contexts": 2, "samples": 2, "new_tokens": 8, "text": "stdlib"},
        ]
    },
    "check": {"long_contexts": 2},
}


def group(**task):
    return json.dumps([{"name": "tiny"}, {"name": "needle", **task}, 0])


def samples(right, length=8000, depth=0.1, contexts=40):
    """Answers in so many contexts of five, right with a probability that `right(context)` gives."""
    rng = np.random.default_rng(0)
    keys = [(group(length=length), c, i) for c in range(contexts) for i in range(5)]
    return {key: {"context": key[1], "depth": depth, "correct": bool(rng.random() < right(key[1]))} for key in keys}


def by(rule, findings):
    return next(f for f in findings if f.rule == rule)


def test_answers_pass_fail_or_stay_open():
    full = samples(lambda c: 1.0, contexts=300)
    few = {key: row for key, row in full.items() if key[1] < 2}
    worse = {key: {**row, "correct": key[2] > 0} for key, row in full.items()}
    outcomes = [judge.answers("p", rows, full, MARGINS).outcome for rows in (full, few, worse)]
    assert outcomes == [judge.PASS, judge.OPEN, judge.FAIL]
    assert "this one takes" in judge.answers("p", few, full, MARGINS).text
    assert judge.answers("p", {}, full, MARGINS) is None


def test_the_worst_case_is_the_weakest_cell_of_long_contexts():
    """A loss at one depth, which the mean over depths hides."""
    full = {}
    for d in range(4):
        for (name, c, i), row in samples(lambda c: 1.0, depth=d / 4).items():
            full[name, c + 100 * d, i] = {**row, "context": c + 100 * d}
    hurt = {key: {**row, "correct": row["depth"] != 0.5} for key, row in full.items()}
    found = judge.worst("p", hurt, full, MARGINS, RULES, 8192)
    assert found.outcome == judge.FAIL and "depth 0.5–0.75: 0.000 right" in found.text and "weakest of 4 cells" in found.text
    assert judge.worst("p", full, full, MARGINS, RULES, 8192).outcome == judge.PASS
    short = judge.worst("p", hurt, full, MARGINS, RULES, 16_001)
    assert short.outcome == judge.OPEN and "0 contexts above 8,000 tokens" in short.text
    assert judge.worst("p", hurt, full, MARGINS, config.Rules(long_contexts=0), 8192) is None


def test_a_cell_of_few_samples_does_not_pass_beside_a_weaker_one_of_many():
    """One right answer of ten is lost in many contexts, which is shown to be less than 20 points; two contexts show nothing."""
    many, few = samples(lambda c: 1.0), samples(lambda c: 1.0, length=7000, contexts=2)
    hurt = {key: {**row, "correct": key[2] > 0 or key[1] % 2 == 0} for key, row in many.items()}
    assert judge.worst("p", hurt, many, MARGINS, RULES, 8192).outcome == judge.PASS
    both = judge.worst("p", hurt | few, many | few, MARGINS, RULES, 8192)
    assert both.outcome == judge.OPEN and "needle of 7,000 tokens" in both.text


def test_json_has_no_infinite_numbers_and_the_page_reads_them_again():
    full = samples(lambda c: 1.0, contexts=1)
    text = {(group(), 0, 0): {"nll": [1.0, 2.0], "nll_reference": [1.0, 1.9], "document": "d"}}
    found = [judge.answers("p", full, full, MARGINS), judge.likelihood("p", text, MARGINS)]
    assert [each.figures["low"] for each in found] == [-1, -np.inf] and found[1].figures["items_needed"] == np.inf
    made = json.dumps(check.Judgement(judge.OPEN, found, {}, None).as_json(), allow_nan=False)
    assert [verdicts._finding(each) for each in json.loads(made)["findings"]] == found
    assert all("more than one of the" in verdicts.words(each) for each in found)


def test_more_repetition_fails():
    row = lambda i, more: {
        "document": f"d{i}", "step_kl": [0.1], "step_top1": [True], "agreed": 0.5, "tokens": 8, "tokens_reference": 8,
        "repetition": 0.1 + more, "repetition_reference": 0.1,
    }  # fmt: skip
    rows = lambda more: {(group(), i, 0): row(i, more + 0.001 * (i % 3)) for i in range(12)}
    outcomes = [judge.continuations("p", rows(more), MARGINS, RULES).outcome for more in (0.0, 0.3)]
    assert outcomes == [judge.PASS, judge.FAIL]


def test_one_failure_outweighs_what_is_open_and_that_what_passes():
    made = lambda *outcomes: judge.outcome([judge.Finding("r", "p", o, "") for o in outcomes])
    assert made("pass", "underpowered", "fail") == "fail" and made("pass", "underpowered") == "underpowered"
    assert made("pass", "pass") == "pass" and check.CODE == {"pass": 0, "fail": 1, "underpowered": 3}


def test_controls_run_on_every_set_of_samples_and_once():
    cells = config.expand(config.read(SMALL)[1])
    made = check.with_controls(cells)
    labels = [c.label for c in made if c.task["name"] == "needle"]
    assert labels == ["window size 60 sinks 4", "full", "float16", "bfloat16", "A/A | prefill in blocks of 256"]
    assert len(made) == 3 * len(labels) and sum(map(compare.is_full, made)) == 3
    assert len(check.with_controls(made)) == len(made)


def test_a_check_of_a_tiny_model(on_tiny, tmp_path, monkeypatch, capsys):
    """From the file to findings, exit code, JSON and JUnit."""
    monkeypatch.chdir(tmp_path)
    made = check.check(SMALL, out=tmp_path)
    assert [f.rule for f in made.findings] == ["answers", "likelihood", "worst case", "continuations", "noise floor"]
    floor = by("noise floor", made.findings)
    assert abs(floor.figures["likelihood"]["difference"]) < 1e-4, "other blocks change rounding only"
    assert abs(by("likelihood", made.findings).figures["difference"]) > 10 * abs(floor.figures["likelihood"]["difference"])
    drift = made.drift["window size 60 sinks 4"]
    assert drift["mean"] > 100 * made.drift["A/A | prefill in blocks of 256"]["mean"] and made.drift["full"]["mean"] == 0
    assert len(drift["by_layer"]) == 2 and len(drift["by_quarter"]) == 4
    assert by("worst case", made.findings).figures["clusters"] == 2
    assert json.loads((tmp_path / "small" / "check.json").read_text())["outcome"] == made.outcome
    reported = {each.label: each for each in verdicts.judged(data.read(tmp_path / "small"))}["window size 60 sinks 4"]
    assert [rule for rule, _, _ in reported.lines] == [f.rule for f in made.findings[:4]]
    monkeypatch.setattr(check, "check", lambda *args: made)
    with pytest.raises(SystemExit) as stop:
        cli.app(["check", "small.toml", "--junit", "j.xml", "--json", "c.json"])
    assert stop.value.code == check.CODE[made.outcome]
    assert json.loads((tmp_path / "c.json").read_text())["outcome"] == made.outcome
    results = [type(r) for suite in JUnitXml.fromfile("j.xml") for case in suite for r in case.result]
    assert results == [{"fail": Failure, "underpowered": Error}[f.outcome] for f in made.findings if f.outcome != "pass"]


def test_the_control_really_sums_in_another_order(on_tiny, tmp_path, tiny, monkeypatch):
    """Other blocks reach the prompt's pass, and change its last bits and no more."""
    ids, blocks = [list(np.random.default_rng(0).integers(0, 256, 500))], set()
    engine = Engine(tiny)
    usual, other = (np.asarray(engine.prefill(ids, block=block).records[1].key_BHTD) for block in (512, 256))
    assert 0 < np.abs(usual - other).max() < 1e-4
    real = Engine.prefill
    monkeypatch.setattr(Engine, "prefill", lambda self, p, n, block: blocks.add(block) or real(self, p, n, block))
    cells = [cell for cell in check.with_controls(config.expand(config.read(SMALL)[1])) if cell.task["name"] == "likelihood"]
    run.execute("blocks", config.read(SMALL)[1], cells, tmp_path, False, False, False)
    assert blocks == {512, 256}


@pytest.mark.parametrize("change,message", [
    ({"check": None}, "no .check. table"),
    ({"check": {"worst": 0.1}}, "unknown key 'worst'; did you mean 'worst_margin'"),
    ({"check": {"worst_margin": 0}}, "margins above 0"),
    ({"base": {"model": {"name": "tiny"}}}, "every policy is the full cache"),
    ({"grid": {"task": SMALL["grid"]["task"][:1]}}, "needs one with answers, such as needle, and likelihood"),
    ({"grid": {"task": SMALL["grid"]["task"][1:]}}, "either alone hides losses"),
])  # fmt: skip
def test_what_cannot_be_judged_is_refused_before_anything_runs(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check.check({key: value for key, value in (SMALL | change).items() if value is not None}, out=tmp_path)


# ------------------------------------------------------------------------------------------------- drawn continuations


def test_continuations_are_compared_as_far_as_they_agree():
    assert agreed([1, 2, 3], [1, 2, 4]) == 2 and agreed([], [1]) == 0 and agreed([1, 2], [1, 2]) == 2
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5) and repetition([1, 2]) == 0
    task, rng = Continuation(length=64, contexts=1, samples=2, new_tokens=4, text="stdlib"), np.random.default_rng(0)
    batch = task.batch(0, 0, Bytes())
    assert batch.seeds == task.batch(0, 0, Bytes()).seeds and len(set(batch.seeds)) == 2 and batch.rows == [0, 0]
    logits, other = rng.standard_normal((2, 4, 2, 5))
    other[:2, 0] = logits[:2, 0]
    mine, full = Answers("ab", [[1, 2, 3, 4], [0]], other), Answers("ab", [[1, 2, 0, 4], [4]], logits)
    first, second = task.score(batch, mine, full)
    assert len(first["step_kl"]) == 2 and max(first["step_kl"]) < 1e-6 and first["agreed"] == 0.5
    assert second["step_kl"] == [] and second["agreed"] == 0
    with pytest.raises(ConfigError, match="kvlab run"):
        task.score(batch, mine)
