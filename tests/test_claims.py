"""Claims: every kind of test on made-up samples, both ways; the files; a whole claim of a small model; the page."""

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest

from kvlab import cli
from kvlab.claims import base, page, reading, run, samples
from kvlab.claims.base import FAILS, HOLDS, OPEN
from kvlab.claims.column import Column
from kvlab.claims.interaction import Interaction
from kvlab.claims.memory import Memory
from kvlab.claims.pair import Pair
from kvlab.claims.trend import Trend
from kvlab.errors import ConfigError, FailedCells, KvlabError, ResultsError
from kvlab.evaluate import trend
from kvlab.experiment import config
from kvlab.tasks import Likelihood, Needle
from tests.tools import Bytes

FILES = sorted((Path(__file__).parent.parent / "experiments" / "claims").glob("*.toml"))
ALPHA = 0.05


def answers(right, contexts=60, questions=8, **fields):
    """Samples that are right where `right(context, question, noise)` says so; a question's noise is the same for all policies."""
    noise = np.random.default_rng(0).random((contexts, questions))
    task = Needle(**fields)
    return {
        (fields.get("length", 2048), c, q): samples.Sample(
            {"correct": bool(right(c, q, noise[c, q])), "depth": (q + 0.5) / questions, "context": c,
             "read_bytes": 100.0, "resident_bytes": 300.0},
            "needle", task, (fields.get("length", 2048), c),
        )
        for c in range(contexts) for q in range(questions)
    }  # fmt: skip


def documents(loss, count=40, length=1024, spread=0.02, seed=0, **more):
    """Likelihoods of documents, 2 nats and `loss` on average; documents differ, and what a policy does to each differs too."""
    hard = np.random.default_rng(1).normal(2, 0.5, count)
    own = np.random.default_rng([seed, length]).normal(loss, spread, count)
    return {
        (length, 0, i): samples.Sample(
            {"nll": [hard[i] + own[i]] * 4, "kl": [abs(own[i])] * 4, "document": f"d{i}",
             "read_bytes": 100.0, "resident_bytes": 300.0, **more},
            "likelihood", Likelihood(length=length), f"d{i}",
        )
        for i in range(count)
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- interactions


def square(a, b, both):
    return {"full": documents(0, seed=0), "a": documents(a, seed=1), "b": documents(b, seed=2), "ab": documents(both, seed=3)}


@pytest.mark.parametrize("both, outcome", [(0.3, FAILS), (1.2, HOLDS), (0.64, OPEN)])
def test_a_factor_is_tested_by_differences(both, outcome):
    """Losses of 0.2 and 0.1: 0.3 is their sum, 1.2 six times the larger, 0.64 just 3.2 times."""
    test = Interaction(name="t", a="a", b="b", both="ab", ratio=3.2)
    found = test.find(square(0.2, 0.1, both), ALPHA)
    assert found.outcome == outcome and found.value == pytest.approx(both - 0.64, abs=0.05)
    assert found.series["value"] == pytest.approx([0.2, 0.1, both], abs=0.02)


@pytest.mark.parametrize("both, outcome", [(0.3, FAILS), (0.4, HOLDS)])
def test_what_goes_beyond_the_sum(both, outcome):
    test = Interaction(name="t", a="a", b="b", both="ab", more_than=0.05)
    found = test.find(square(0.2, 0.1, both), ALPHA)
    assert found.outcome == outcome and found.value == pytest.approx(both - 0.3, abs=0.03)


def test_either_alone_means_the_dearer_of_the_two():
    """Six times b's loss is no more than the sum where a's is five times that."""
    found = Interaction(name="t", a="a", b="b", both="ab", ratio=3.2).find(square(0.5, 0.1, 0.6), ALPHA)
    assert found.outcome == FAILS and "1.2" in found.text


def test_a_factor_holds_only_where_it_is_shown_for_both():
    """3.2 times a's loss is clearly exceeded; what b loses is hardly known, and seen by chance to be the farther away."""
    table = square(0.2, 0.1, 0.72) | {"b": documents(0.19, seed=10, spread=1.0)}
    found = Interaction(name="t", a="a", b="b", both="ab", ratio=3.2).find(table, ALPHA)
    alone = [Interaction(name="t", a=c, b=c, both="ab", ratio=3.2).find(table, ALPHA) for c in "ab"]
    assert [each.outcome for each in alone] == [HOLDS, OPEN] and alone[0].value < alone[1].value
    assert found.outcome == OPEN and (found.value, found.low, found.high) == (alone[0].value, alone[1].low, alone[0].high)


def test_answers_lost_by_both_changes_only():
    lost = lambda *hit: lambda c, q, noise: not any(low <= noise < high for low, high in hit)
    a, b, extra = (0, 0.1), (0.1, 0.15), (0.2, 0.45)
    of = lambda both: {"full": answers(lost()), "a": answers(lost(a)), "b": answers(lost(b)), "ab": answers(both)}
    test = Interaction(name="t", a="a", b="b", both="ab", measure="correct", more_than=0.1)
    assert test.find(of(lost(a, b)), ALPHA).outcome == FAILS
    beyond = test.find(of(lost(a, b, extra)), ALPHA)
    assert beyond.outcome == HOLDS and beyond.unit == "points" and beyond.value == pytest.approx(0.25, abs=0.05)


# ---------------------------------------------------------------------------------------------------------- trends


def lengths(loss_at, spread=0.02):
    of = lambda loss, seed: {
        key: sample
        for length in (512, 1024, 2048, 4096)
        for key, sample in documents(loss(length), 12, length, spread, seed).items()
    }
    return {"full": of(lambda n: 0, 0), "p": of(loss_at, 1)}


@pytest.mark.parametrize("loss, outcome", [
    (lambda n: 0.1 * math.log2(n / 256), HOLDS), (lambda n: 0.2, FAILS), (lambda n: 0.5 - 0.1 * math.log2(n / 256), FAILS),
])  # fmt: skip
def test_a_loss_that_grows_by_the_doubling(loss, outcome):
    found = Trend(name="t", policy="p", covariate="length", more_than=0.05).find(lengths(loss), ALPHA)
    assert found.outcome == outcome and found.series["x"] == [512, 1024, 2048, 4096]
    assert found.value == pytest.approx((loss(4096) - loss(512)) / 3, abs=0.02)
    assert found.clusters == 12, "a document at four lengths is one cluster"


def test_growth_relative_to_the_mean():
    table = lengths(lambda n: 0.001 * math.log2(n / 256), 1e-4)
    wanted = {"policy": "p", "covariate": "length", "measure": "kl", "relative": True}
    found = Trend(name="t", more_than=0.1, **wanted).find(table, ALPHA)
    assert found.outcome == HOLDS and found.value == pytest.approx(1 / 2.5, rel=0.2)
    assert Trend(name="t", more_than=0.8, **wanted).find(table, ALPHA).outcome == FAILS


@pytest.mark.parametrize("contexts, outcome", [(60, HOLDS), (2, OPEN)])
def test_a_loss_that_falls_with_depth(contexts, outcome):
    """A window that keeps the last quarter."""
    table = {
        "full": answers(lambda c, q, noise: noise < 0.8, contexts),
        "p": answers(lambda c, q, noise: q >= 6 and noise < 0.8, contexts),
    }
    test = Trend(name="t", policy="p", covariate="depth", scale="linear", direction="falls", measure="correct", more_than=0.3)
    assert test.find(table, ALPHA).outcome == outcome and "less for the whole of depth" in test.find(table, ALPHA).text
    other = Trend(name="t", policy="p", covariate="depth", scale="linear", measure="correct", more_than=0.3)
    assert contexts < 60 or other.find(table, ALPHA).outcome == FAILS, "it does not rise"


def test_covariates_are_summed_and_named():
    table = {label: answers(lambda c, q, n: True) | answers(lambda c, q, n: True, length=4096, distractors=24) for label in "pf"}
    keys = Trend(name="t", policy="p", reference="f", covariate=["needles", "distractors"], measure="correct", more_than=0.1)
    found = keys.find(table, ALPHA)
    assert (found.items, found.clusters) == (960, 120) and "a doubling of needles + distractors" in found.text
    units = Trend(name="t", policy="p", reference="f", covariate="distractors", scale="linear", measure="correct")
    assert "for one more of distractors" in units.find(table, ALPHA).text
    assert found.series["x"] == [10, 34] and found.outcome == FAILS and found.low < 0 < found.high, "no events are not certainty"
    with pytest.raises(ConfigError, match="covariate 'dept' is no number of needle; did you mean 'depth'"):
        Trend(name="t", policy="p", reference="f", covariate="dept", measure="correct").find(table, ALPHA)
    with pytest.raises(ConfigError, match='write scale = "linear"'):
        Trend(name="t", policy="p", reference="f", covariate="distractors", measure="correct").find(table, ALPHA)


@pytest.mark.parametrize("count, relative", [(10, False), (40, False), (40, True)])
def test_intervals_of_slopes_hold_what_they_promise(count, relative):
    """A slope of 0.5 over items whose clusters differ in height and in slope; 90 % intervals, counted without clusters too."""
    rng, inside, naive = np.random.default_rng(0), 0, 0
    clusters, x = np.repeat(np.arange(count), 6), np.tile(np.arange(6.0), count)
    for trial in range(120):
        height, steep = rng.normal(4, 0.3, count)[clusters], rng.normal(0.5, 0.5, count)[clusters]
        y = height + steep * x + rng.normal(0, 0.3, len(x))
        made = trend.slope(x, y, list(clusters), ALPHA, relative, seed=trial)
        truth = 0.5 / (4 + 0.5 * 2.5) if relative else 0.5
        inside += made.low <= truth <= made.high
        alone = trend.slope(x, y, list(range(len(x))), ALPHA, relative, seed=trial)
        naive += alone.low <= truth <= alone.high
    assert 0.83 <= inside / 120 <= 0.965 and naive < inside


def test_slopes_without_variation():
    with pytest.raises(KvlabError, match="covariate is the same"):
        trend.slope([1, 1], [0, 1], [0, 1])
    assert trend.slope([1, 2], [0, 1], [0, 0]).high == math.inf, "one cluster"
    assert trend.slope([1, 2], [0, 1], [0, 1]).high == math.inf, "none is left where one is taken away"
    exact = trend.slope([1, 2, 4] * 3, [3, 5, 9] * 3, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert (exact.value, exact.low, exact.high) == pytest.approx((2, 2, 2))


# ----------------------------------------------------------------------------------------------------------- pairs


def test_better_no_worse_and_worse_by_a_margin():
    table = {"full": documents(0), "good": documents(0.001, seed=1, spread=0.002), "bad": documents(0.1, seed=2)}
    outcome = lambda **options: Pair(name="t", **options).find(table, ALPHA).outcome
    assert outcome(policy="good", against="bad") == HOLDS and outcome(policy="bad", against="good") == FAILS
    assert outcome(policy="good", against="full", more_than=-0.02) == HOLDS, "non-inferior"
    assert outcome(policy="bad", against="full", more_than=-0.02) == FAILS
    assert (
        outcome(policy="full", against="bad", more_than=0.05) == HOLDS
        and outcome(policy="full", against="bad", more_than=0.2) == FAILS
    )
    few = {label: dict(list(rows.items())[:2]) for label, rows in table.items()}
    found = Pair(name="t", policy="full", against="good", more_than=0.001).find(few, ALPHA)
    assert found.outcome == OPEN and "2 texts leave it open" in found.text


def test_answers_are_compared_in_points():
    table = {"a": answers(lambda c, q, n: n < 0.9), "b": answers(lambda c, q, n: n < 0.7)}
    found = Pair(name="t", policy="a", against="b", measure="correct", more_than=0.05).find(table, ALPHA)
    assert found.outcome == HOLDS and found.value == pytest.approx(0.2, abs=0.04) and "+2" in found.text


def test_unequal_bytes_settle_nothing():
    table = {"a": documents(0), "b": documents(0.1, seed=1, read_bytes=150.0)}
    test = lambda equal: Pair(name="t", policy="a", against="b", equal=equal).find(table, ALPHA)
    assert test("resident_bytes").outcome == HOLDS and test(None).outcome == HOLDS
    unequal = test("read_bytes")
    assert unequal.outcome == OPEN and "differ by more than 2%" in unequal.text
    assert unequal.series["read_bytes"] == [100, 150]


def test_where_names_fields_of_the_task():
    table = {"a": documents(0) | answers(lambda c, q, n: True), "b": documents(0) | answers(lambda c, q, n: True)}
    count = lambda **where: len(samples.paired(table, ["a", "b"], "correct", where).samples)
    assert count() == count(name="needle") == count(length=2048) == 480
    with pytest.raises(ResultsError, match="likelihood has nll"):
        count(name="likelihood")


# --------------------------------------------------------------------------------------------------------- columns


def entropies(layers, seed):
    made = documents(0, seed=seed)
    noise = np.random.default_rng(seed).normal(0, 0.05, (len(made), len(layers)))
    return {key: s._replace(row={**s.row, "entropy_by_layer": np.array(layers) + n}) for (key, s), n in zip(made.items(), noise)}


def test_entropy_falls_and_where():
    table = {"full": entropies([3, 3, 3, 3], 0), "p": entropies([2, 2, 3.5, 3], 1)}
    found = Column(name="t", policy="p", more_than=0.1).find(table, ALPHA)
    assert found.outcome == HOLDS and found.value == pytest.approx(1.5 / 4, abs=0.03)
    assert "it falls in 2 of 4 layers" in found.text and "rises in 1 (2), open in 1" in found.text
    assert Column(name="t", policy="p", direction="rises").find(table, ALPHA).outcome == FAILS
    inner = Column(name="t", policy="p", direction="rises", layers=(2, 3)).find(table, ALPHA)
    assert inner.outcome == HOLDS and inner.series["layer"] == [2, 3] and "most in 2" in inner.text


def test_a_scalar_column():
    table = {"full": documents(0, read_ratio=1.0), "p": documents(0, read_ratio=0.4)}
    found = Column(name="t", policy="p", column="read_ratio", more_than=0.5).find(table, ALPHA)
    assert found.outcome == HOLDS and found.value == pytest.approx(0.6)


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("says, rounded, outcome", [
    ("64MiB", 0, HOLDS), ("67108864", 0, HOLDS), ("67 MB", 0, FAILS), ("67 MB", 0.01, HOLDS), ("256 MB", 0.05, FAILS),
])  # fmt: skip
def test_figures_against_arithmetic(says, rounded, outcome):
    """One layer's keys and values of 4,096 tokens and 4,096 numbers in 16 bits."""
    test = Memory(name="t", dims="layers=1,kv_heads=32,head_dim=128", dtype="float16", says=says, rounded=rounded)
    found = test.find({}, ALPHA)
    assert found.outcome == outcome and found.value == 2 * 4096 * 4096 * 2 and "= 67,108,864 bytes (64 MiB)" in found.text
    assert ("3.81 times too much" in found.text) == (says == "256 MB")


def test_growth_with_the_length():
    of = lambda **more: Memory(name="t", dims="layers=2,kv_heads=2,head_dim=64", linear=[512, 1024, 4096], **more).find({}, ALPHA)
    assert of().outcome == HOLDS and of(level="resident", rounded=0.01).outcome == HOLDS
    assert of(policy=["retention=window", "retention.size=256"]).outcome == FAILS, "a window does not grow"
    with pytest.raises(ConfigError, match="give one of says"):
        Memory(name="t", dims="layers=2,kv_heads=2,head_dim=64")


# ----------------------------------------------------------------------------------------------- rules and refusals


def test_all_and_any():
    made = lambda *outcomes: [base.Finding("pair", "n", o != "beside", o, "", 0, 0, 0, 0, "") for o in outcomes]
    assert base.outcome(made(HOLDS, FAILS, OPEN), "all") == FAILS and base.outcome(made(HOLDS, OPEN), "all") == OPEN
    assert base.outcome(made(HOLDS, FAILS, OPEN), "any") == HOLDS and base.outcome(made(FAILS, OPEN), "any") == OPEN
    assert base.outcome(made(FAILS, FAILS), "any") == FAILS and base.outcome(made(HOLDS, "beside"), "all") == HOLDS


def test_deciding_tests_share_alpha():
    tests = [Pair(name="t", policy="a"), Pair(name="t", policy="b"), Pair(name="t", policy="c", decides=False)]
    assert base.share(0.05, tests) == 0.025
    both = Interaction(name="t", a="a", b="b", both="ab", ratio=2)
    assert base.share(0.06, [*tests[1:], both]) == pytest.approx(0.02), "a factor rests on two intervals"
    assert base.share(0.05, [*tests, Memory(name="t", dims="", says="1")]) == 0.025, "arithmetic takes none"


def test_what_would_settle_it():
    table = {"full": documents(0), "p": documents(0.02, seed=1, spread=0.05)}
    found = Pair(name="t", policy="full", against="p", more_than=0.004).find(table, ALPHA)
    assert found.outcome == OPEN and found.clusters < found.clusters_needed < 1000
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(100):  # as many documents settle it in four cases of five
        drawn = rng.normal(found.value, 0.054, int(found.clusters_needed))
        hits += samples.mean(drawn, range(len(drawn)), "nll", ALPHA).low > 0.004
    assert 65 <= hits <= 95


CLAIM = {
    "statement": "a", "source": "b", "holds_if": "c", "act": {"holds": "Do.", "fails": "Do not.", "underpowered": "Wait."},
}  # fmt: skip
SMALL = {
    "name": "small",
    "question": "is it so?",
    "expect": "no | yes",
    "base": {"model": {"name": "tiny"}},
    "grid": {
        "task": [
            {"name": "likelihood", "length": 128, "contexts": 2, "continuation": 6, "text": "stdlib"},
            {"name": "likelihood", "length": 256, "contexts": 2, "continuation": 6, "text": "stdlib"},
        ],
        "policy": [{"label": "full"}, {"label": "w", "retention": {"name": "window", "size": 60, "sinks": 4}}],
    },
    "claim": CLAIM
    | {
        "test": [
            {"kind": "pair", "name": "nll", "policy": "full", "against": "w"},
            {"kind": "column", "name": "entropy", "policy": "w"},
            {"kind": "trend", "name": "kl", "policy": "w", "covariate": "length", "measure": "kl", "decides": False},
            {"kind": "trend", "name": "drift", "policy": "w", "covariate": "length", "measure": "drift", "decides": False},
        ]
    },
}


@pytest.mark.parametrize("change, message", [
    ({"test": [{"kind": "pear", "name": "t"}]}, "did you mean 'pair'"),
    ({"test": [{"kind": "pair", "name": "t", "policy": "full", "agianst": "w"}]}, "key 'agianst'; did you mean 'against'"),
    ({"test": [{"kind": "pair", "name": "t", "policy": "fall"}]}, "no policy 'fall'; did you mean 'full'"),
    ({"test": [{"kind": "pair", "name": "t", "policy": "w", "where": {"name": "needle"}}]}, "'w' has no task where"),
    ({"test": [{"kind": "pair", "name": "t", "policy": "w", "decides": False}]}, "no test decides"),
    ({"act": {"holds": "Do."}}, "fails, underpowered"),
    ({"statment": "x"}, "did you mean 'statement'"),
])  # fmt: skip
def test_what_cannot_be_tested_is_refused_before_anything_runs(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run.claim(SMALL | {"claim": SMALL["claim"] | change}, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_documents_of_several_lengths_end_in_the_same_tokens():
    of = lambda length, until: Likelihood(length, 2, 8, "stdlib", until).batch(0, 0, Bytes())
    short, long, plain = of(32, 96), of(96, 96), of(96, None)
    assert short.forced == long.forced == plain.forced and list(long.prompts) == list(plain.prompts)
    for few, many in zip(short.prompts, long.prompts):
        begin = list(Bytes().begin)
        assert len(few) == 32 and few[len(begin) :] == many[len(many) - 32 + len(begin) :] and few[: len(begin)] == begin
    with pytest.raises(ConfigError, match="until=16; allowed: 32 and more"):
        Likelihood(length=32, until=16)


def test_an_experiment_without_a_claim_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no .claim. table"):
        run.claim({key: value for key, value in SMALL.items() if key != "claim"}, out=tmp_path)


@pytest.mark.parametrize("smoke", [False, True], ids=["whole", "smoke"])
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_claim_of_the_repository_is_complete(file, smoke):
    name, experiment = config.read(file)
    claim = reading.read(name, experiment)
    cells = config.expand(experiment, (), smoke) if experiment.base else []
    reading.complete(claim, cells)
    assert "Registered before the run" in experiment.expect and bool(cells) == any(test.labels for test in claim.tests)
    assert file.read_text().startswith(f"# kvlab claim experiments/claims/{file.name}\n")


# ------------------------------------------------------------------------------------------------------ whole claims


def test_a_claim_of_a_tiny_model(on_tiny, tmp_path):
    """All kinds that look at likelihoods, from the file to figures and the picture; judged again from what is on disk."""
    made = run.claim(SMALL, out=tmp_path, keep=tmp_path / "kept")
    kept = json.loads((tmp_path / "kept" / "small.json").read_text())
    assert kept == json.loads((tmp_path / "small" / "claim.json").read_text()) and kept["outcome"] == made.outcome
    assert (tmp_path / "kept" / "small.png").stat().st_size > 5000
    pair, column, *trends = made.findings
    frame = kept["policies"]
    assert pair.value == pytest.approx(frame["w"]["delta_nll"], rel=1e-5) and pair.clusters == column.clusters
    assert len(column.series["layer"]) == 2 and column.value != 0
    kl = dict(zip(trends[0].series["x"], trends[0].series["value"]))
    assert np.mean(list(kl.values())) == pytest.approx(frame["w"]["kl_mean"], rel=1e-5) and set(kl) == {128, 256}
    assert made.alpha == 0.025 and "act" not in kept and made.sentence.endswith(("Do.", "Do not.", "Wait."))
    again = run.claim(SMALL, out=tmp_path)
    assert again.as_json() == made.as_json()


def test_failed_cells_are_tried_again_as_their_error_says(monkeypatch):
    asked = inspect.signature(run.run.execute)

    def execute(*args):
        raise FailedCells(f"retry {asked.bind(*args).arguments['retry']}", 1)

    monkeypatch.setattr(run.run, "execute", execute)
    source = next(file for file in FILES if file.stem == "entropy")
    for options, retry in (([], False), (["--retry"], True)):
        with pytest.raises(FailedCells, match=f"retry {retry}"):
            cli.app(["claim", str(source), *options], standalone_mode=False)


def test_the_smoke_of_a_file_on_tiny_recall_and_the_page(tmp_path, monkeypatch, capsys):
    """The command, what it keeps, and the page that lists claims that were run and claims that were not."""
    folder = tmp_path / "claims"
    folder.mkdir()
    for name in ("int4_sparse_tiny_recall", "memory_figures", "entropy"):
        source = next(file for file in FILES if file.stem == name)
        (folder / source.name).write_text(source.read_text())
    monkeypatch.chdir(tmp_path)
    for name, more in (("int4_sparse_tiny_recall", ["--smoke"]), ("memory_figures", [])):
        with pytest.raises(SystemExit) as stop:
            cli.app(["claim", f"claims/{name}.toml", "--keep", "claims/results", "--json", "c.json", *more])
        assert stop.value.code == 0
    assert json.loads(Path("c.json").read_text()) == json.loads(Path("claims/results/memory_figures.json").read_text())
    with pytest.raises(SystemExit):
        cli.app(["claim", "--page", "claims/README.md"])
    told = capsys.readouterr().out
    assert "A smoke run, which says nothing." in told and "3.81 times too much is said" in " ".join(told.split())
    text = Path("claims/README.md").read_text()
    assert "(#memory_figures) | **does not hold** |" in text and "(#entropy) | not run yet |" in text
    assert "(a smoke run, which says nothing)" in text and text.count("Registered before the run") == 3
    assert "    kvlab claim claims/memory_figures.toml\n" in text
    for image in ("results/memory_figures.png", "results/int4_sparse_tiny_recall.png"):
        assert f"]({image})" in text and (folder / image).exists()
    with pytest.raises(ConfigError, match="no claims in"):
        page.write(tmp_path / "README.md")


def test_a_claim_without_a_model_takes_no_overrides(tmp_path):
    source = next(file for file in FILES if file.stem == "memory_figures")
    with pytest.raises(ConfigError, match="no cell that task.length=64 could change"):
        run.claim(source, ["task.length=64"], out=tmp_path)


def test_a_verdict_stands_beside_the_statement_that_it_is_about(tmp_path):
    """The file was changed after the run."""
    source = next(file for file in FILES if file.stem == "memory_figures")
    (tmp_path / source.name).write_text(source.read_text())
    made = run.claim(tmp_path / source.name, out=tmp_path / "out", keep=tmp_path / "results")
    (tmp_path / source.name).write_text(source.read_text().replace(made.claim.statement, "Something else."))
    page.write(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert "Something else." not in text and text.count(made.claim.statement) == 2
