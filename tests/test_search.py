"""`kvlab run --search`: whole searches on tiny-recall and on a random model, what they spend, and what they say."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import kvlab
from kvlab import cli, compilation
from kvlab.errors import ConfigError
from kvlab.evaluate import sequential
from kvlab.evaluate.sequential import FAIL, FUTILE, OPEN, PASS, Seen
from kvlab.experiment import compare, config, group
from kvlab.experiment.kept import Kept
from kvlab.experiment.search import answer, answer_picture, points, search

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RECALL = {
    "name": "recall",
    "question": "how sparse?",
    "base": {
        "model": {"name": "tiny-recall"},
        "policy": {"selection": {"name": "hysparse", "gate": "tiny-recall", "sinks": 0, "recent": 1}},
    },
    "grid": {"seed": [0, 1], "task": [{"name": "mqar", "length": 128, "contexts": 24, "pairs": 16, "queries": 8}]},
    "search": {"path": "policy.selection.sparsity", "values": [0.5, 0.8, 0.9, 0.995], "looks": 3},
    "verdict": {"accuracy_margin": 0.1},
    "smoke": {"search.values": [0.5, 0.995], "search.looks": 1, "task.contexts": 2},
}
WINDOW = {
    "name": "window",
    "question": "how short?",
    "base": {"model": {"name": "tiny"}, "seed": 3},
    "grid": {
        "task": [
            {"name": "needle", "length": 250, "contexts": 2, "needles": 2, "new_tokens": 3, "text": "stdlib"},
            {"name": "likelihood", "length": 250, "contexts": 3, "continuation": 4, "text": "stdlib"},
        ],
    },
    "search": {"path": "policy.retention", "values": [{"name": "window", "size": n, "sinks": 4} for n in (188, 124, 60)]},
    "verdict": {"accuracy_margin": 0.3, "nll_margin": 1e-9, "alpha": 0.2},
}


@dataclasses.dataclass
class Watched:
    """What a search asked the engine for."""

    prefills: list
    decodes: list

    @classmethod
    def on(cls, patch):
        made, prefill, decode = cls([], []), group.Engine.prefill, group.decode
        first = lambda prompts: tuple(tuple(p) for p in prompts)
        patch.setattr(group.Engine, "prefill", lambda self, p, *more: made.prefills.append(first(p)) or prefill(self, p, *more))

        def seen(engine, prompt, policies, *more, **options):
            plain = policies is group.FULL or all(p == group.FULL for p in policies)
            made.decodes.append((plain, first(prompt.prompts)))
            return decode(engine, prompt, policies, *more, **options)

        patch.setattr(group, "decode", seen)
        return made


@pytest.fixture(scope="module")
def recall(tmp_path_factory):
    """A whole search, what it asked for, and the decode programs it compiled."""
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched.on(patch)
        with compilation.counting("decode") as programs:
            found = search.search(RECALL, out=tmp_path_factory.mktemp("recall"))
    return found, watched, len(programs)


def test_the_most_aggressive_value_that_passes_is_found(recall):
    """The gate finds one pair of 16 among a tenth of the tokens, and nothing where it may read one token."""
    found, _, _ = recall
    states = {each.value: each.state for each in found.visited.values()}
    assert states == {0.8: PASS, 0.9: PASS, 0.995: FAIL}
    assert found.passed == 2 and found.outcome == "pass" and search.CODE[found.outcome] == 0
    lost = found.visited[3].seen["answers"]
    assert lost.high < -0.1 and found.visited[2].seen["answers"].low > -0.1
    assert found.visited[3].batches < found.visited[2].batches, "a hopeless value costs few samples"
    text = answer.sentence(found)
    assert "sparsity 0.9 is the most aggressive of these that costs less than 10 points, shown with " in text
    assert f"sparsity 0.995 loses {-lost.difference * 100:.1f} points [" in text


def test_a_batch_is_prefilled_once_and_its_reference_decoded_once(recall):
    found, watched, _ = recall
    most = max(each.batches for each in found.visited.values())
    assert len(watched.prefills) == len(set(watched.prefills)) == most
    plain = [prompts for full, prompts in watched.decodes if full]
    assert len(plain) == len(set(plain)) == most
    assert len(watched.decodes) - len(plain) == sum(each.batches for each in found.visited.values())


def test_sparsities_share_one_decode_program(recall):
    """CASES 18: a sparsity is an array leaf. The other program is the full cache's."""
    found, _, programs = recall
    assert programs == 2 and [each.programs for each in found.visited.values()] == [2, 0, 0]
    assert "decode programs compiled: 2," in answer._caption(found)


def test_looks_use_the_samples_of_their_look_and_the_stated_levels(recall):
    """The first value's interval by hand, from the files."""
    found, _, _ = recall
    first = found.visited[1]
    cells = [cell for cell in points.read(config.read(RECALL)[1])[1][1].cells]
    rows = compare.samples(cells, found.folder)
    assert first.level == pytest.approx(0.05 / 3) and first.samples == first.seen["answers"].items == len(rows)
    plan = sequential.Plan.of((1 / 3, 2 / 3, 1.0), 0.05 / 3, 0.05 / 3)
    full = [config.Cell(c.model, c.task, {"label": "full"}, (), c.seed) for c in cells]
    low = compare.answers(rows, compare.samples(full, found.folder), 0.1, plan.passing[first.looks - 1]).low
    assert first.seen["answers"].low == low and found.visited[2].level == pytest.approx(0.05 / 2)


def test_what_is_written_beside_the_cells(recall):
    found, _, _ = recall
    made = json.loads((found.folder / "search.json").read_text())
    assert made["value"] == 0.9 and made["outcome"] == "pass" and made["sentence"] == answer.sentence(found)
    assert [each["value"] for each in made["visited"]] == [0.8, 0.9, 0.995] and made["programs"] == 2
    assert made["batches_of_all"] == 4 * 48 > made["batches_spent"]
    assert (found.folder / "search.png").stat().st_size > 5000
    labels = set(kvlab.results.load(found.folder)["policy"])
    assert len(labels) == 4 and "full" in labels and sum("sparsity 0.9" in label for label in labels) == 2
    complete = [each for each in found.visited.values() if each.batches == found.batches]
    assert len(kvlab.results.load(found.folder, "cells")) == 2 * (len(complete) + 1), "cells that are cut short have no summary"


def comparable(folder):
    made = json.loads((folder / "search.json").read_text())
    visited = [{key: value for key, value in each.items() if key != "programs"} for each in made.pop("visited")]
    made.pop("programs")
    return made, visited


def test_a_finished_search_computes_nothing_again(recall, tmp_path, monkeypatch):
    found, _, _ = recall
    shutil.copytree(found.folder, tmp_path / "recall")
    watched = Watched.on(monkeypatch)
    again = search.search(RECALL, out=tmp_path)
    assert not watched.prefills and not watched.decodes and comparable(again.folder) == comparable(found.folder)


def test_a_search_that_was_stopped_goes_on_the_way_it_went(recall, tmp_path, monkeypatch):
    """CASES 31: stopped in the middle of the second value."""
    found, _, _ = recall
    real, calls = group.decode, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 2 * found.visited[1].batches + 5:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(group, "decode", failing)
    with pytest.raises(KeyboardInterrupt):
        search.search(RECALL, out=tmp_path)
    done = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*/samples/*.json")}
    assert len(done) == len(calls) - 1
    again = search.search(RECALL, out=tmp_path)
    assert all(p.stat().st_mtime_ns == t for p, t in done.items()) and comparable(again.folder) == comparable(found.folder)


def test_fresh_and_smoke_through_the_command_line(tmp_path, monkeypatch, capsys):
    import tomli_w

    monkeypatch.chdir(tmp_path)
    Path("recall.toml").write_text(tomli_w.dumps({key: value for key, value in RECALL.items() if key != "name"}))
    command = ["run", "recall.toml", "--search", "--smoke", "--json", "s.json"]
    for more in ([], ["--fresh"]):
        done = {p: p.stat().st_mtime_ns for p in tmp_path.glob("results/*/*/samples/*.json")}
        with pytest.raises(SystemExit) as stop:
            cli.app([*command, *more])
        assert stop.value.code == 3, "four contexts settle no ten points where nothing is lost"
    assert len(done) == 8 and all(p.stat().st_mtime_ns > t for p, t in done.items())
    shown = " ".join(capsys.readouterr().out.split())
    assert "Nothing is settled: sparsity 0.5, the mildest" in shown and "wrote results/recall-smoke/search.png" in shown
    assert json.loads(Path("s.json").read_text())["values"] == [0.5, 0.995]
    cli.app(["run", "recall.toml", "--search", "--dry-run"], standalone_mode=False)
    assert "recall: 8 cells, 192 batches" in capsys.readouterr().out


def test_answers_and_likelihood_are_both_asked_for(on_tiny, tmp_path, monkeypatch):
    """A random model answers nothing, so answers stay open; the window loses nats, and either is enough to refuse it."""
    watched = Watched.on(monkeypatch)
    found = search.search(WINDOW, out=tmp_path)
    assert found.passed == -1 and list(found.visited) == [1, 0]
    for each in found.visited.values():
        assert set(each.seen) == {"answers", "likelihood"} and each.state != PASS
        assert each.seen["likelihood"].clusters == 3 and each.seen["answers"].items <= 4
    plain = [prompts for full, prompts in watched.decodes if full]
    assert len(plain) == len(set(plain)), "the reference of a likelihood, too, is decoded once"
    assert sum(each.programs for each in found.visited.values()) > 3, "every window has another shape"
    figure = {kind: answer.figures(kind, seen) for kind, seen in found.visited[0].seen.items()}
    assert figure["answers"].startswith("+0.0 points [") and figure["likelihood"].startswith("ΔNLL ")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"search": None}, "no .search. table; write one"),
        ({"search": {"values": [1, 2]}}, "missing required field `path`"),
        ({"search": {**RECALL["search"], "value": [1]}}, "unknown key 'value'; did you mean 'values'"),
        ({"search": {**RECALL["search"], "values": [0.5]}}, "give two or more, from the mildest"),
        ({"search": {**RECALL["search"], "values": 0.5}}, "Expected `array`"),
        ({"search": {**RECALL["search"], "looks": 0}}, "allowed: 1 … 50"),
        ({"search": {**RECALL["search"], "path": "task.length"}}, "would be other samples"),
        ({"search": {**RECALL["search"], "path": "policy"}}, "a dotted path in policy or layers"),
        ({"search": {**RECALL["search"], "path": "policy.selection.sparsty"}}, "no option 'sparsty'"),
        ({"search": {**RECALL["search"], "values": [0, 0.0]}}, "0.0 and 0.0 give the same policy"),
        ({"search": {**RECALL["search"], "values": [0.5, 1.5]}}, "sparsity=1.5; allowed"),
        ({"search": {"path": "policy.codec", "values": ["int8", {"name": "int8"}]}}, "give the same policy"),
        ({"base": {"model": {}}, "search": {"path": "policy.codec", "values": ["raw", "int8"]}}, "gives the full cache"),
        ({"grid": {**RECALL["grid"], "policy.codec": ["int8"]}}, "the grid varies policy.codec; allowed: task and seed"),
        ({"grid": {"task": [{"name": "continuation"}]}}, "neither answers nor likelihood"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        search.search({key: value for key, value in (RECALL | change).items() if value is not None}, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_search_is_not_run_by_mistake(tmp_path):
    import tomli_w

    with pytest.raises(ConfigError, match="kvlab run FILE --search"):
        kvlab.run(RECALL, out=tmp_path)
    file = tmp_path / "recall.toml"
    file.write_text(tomli_w.dumps({key: value for key, value in RECALL.items() if key != "name"}))
    refused = {"": "FILE --search", "--dry-run": "FILE --search", "--search --workers=2": "one process"}
    for options, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            cli.app(["run", str(file), f"--out={tmp_path / 'out'}", *options.split()], standalone_mode=False)
    assert list(tmp_path.iterdir()) == [file]


def test_names_of_values():
    codecs = ["int8", {"name": "kivi", "bits": 2}, {"k": "int8", "v": "int4"}]
    _, made = points.read(config.read({**RECALL, "search": {"path": "policy.codec", "values": codecs}})[1])
    assert [point.name for point in made] == ["codec int8", "codec kivi bits 2", "codec K int8 / V int4"]
    assert [point.name for point in points.read(config.read(RECALL)[1])[1]][:2] == ["sparsity 0.5", "sparsity 0.8"]


def test_samples_are_spent_in_turn_over_tasks_and_seeds():
    tasks = [*RECALL["grid"]["task"], {"name": "likelihood", "contexts": 2, "length": 64}]
    _, made = points.read(config.read({**RECALL, "grid": {"seed": [0, 1, 2], "task": tasks}})[1])
    course = points.Course(made[0].cells, 5)
    assert course.measures == ("answers", "likelihood") and course.batches == 3 * 24 + 3
    added = [course.added(look) for look in range(1, 6)]
    flat = [place for places in added for place in places]
    assert len(set(flat)) == len(flat) == course.batches and [len(places) for places in added] == [16, 15, 15, 15, 14]
    first = [index for group, index in added[0] if "mqar" in group]
    assert first == sorted(first) and first[:3] == [0, 0, 0], "every seed's first batch comes first"
    assert course.shares("likelihood") == pytest.approx([1 / 3, 2 / 3, 1]), "looks without new documents are none"
    assert course.shares("answers") == pytest.approx([15 / 72, 29 / 72, 44 / 72, 58 / 72, 1])


def test_what_is_kept_is_made_once_as_long_as_it_fits():
    kept, calls = Kept(1000), []

    def make(size):
        calls.append(size)
        return {"x": [np.zeros(size, np.int8)]}

    for size in (600, 600, 300, 200, 200, 300):
        kept.get(size, lambda size=size: make(size))
    assert calls == [600, 300, 200, 200], "200 more than fits is made anew"


# ---------------------------------------------------------------------------------------------------------- what is said


def point(state, difference=0.0, low=-0.005, high=0.005, kind="answers", needed=5000.0):
    return {kind: Seen(state, difference, low, high, 0.01, 640, 40, 0.5, needed)}


def found(visited, passed, names=("sparsity 0.7", "sparsity 0.8", "sparsity 0.9"), folder=Path()):
    asked = points.Search("policy.selection.sparsity", [0.7, 0.8, 0.9])
    made = {
        i: search.Visited(
            names[i], asked.values[i], sequential.together([s.state for s in seen.values()]), 0.01, 2, 40, 640, 1, seen
        )
        for i, seen in visited.items()
    }
    return search.Found(asked, list(names), config.Margins(), passed, made, 80, folder)


LOST = point(FAIL, -0.042, -0.06, -0.02)
HELD = point(OPEN, -0.006, -0.021, 0.008)
GIVEN_UP = point(FUTILE, -0.006, -0.021, 0.008)


@pytest.mark.parametrize(
    "visited,passed,outcome,text",
    [
        (
            {1: point(PASS), 2: LOST}, 1, "pass",
            "sparsity 0.8 is the most aggressive of these that costs less than 1 point, shown with 640 questions in 40 contexts; "
            "sparsity 0.9 loses 4.2 points [2.0, 6.0].",
        ),
        ({1: point(PASS), 2: point(PASS)}, 2, "pass", "it is the last of the values, so more may be possible."),
        (
            {0: point(PASS), 1: HELD, 2: LOST}, 0, "pass",
            "sparsity 0.8 stays open, -0.6 points [-2.1, +0.8] with 640 questions (about 5,000 would settle it if nothing is "
            "lost), sparsity 0.9 fails, and between sparsity 0.7 and sparsity 0.9 nothing is settled.",
        ),
        (
            {1: point(PASS), 2: GIVEN_UP}, 1, "pass",
            "sparsity 0.9 stays open, -0.6 points [-2.1, +0.8] with 640 questions (given up: the rest would hardly have made "
            "it pass).",
        ),
        (
            {1: LOST, 0: LOST}, -1, "fail",
            "None of these passes: sparsity 0.7, the mildest, loses 4.2 points [2.0, 6.0], where 1 point may be lost.",
        ),
        (
            {1: HELD, 0: HELD}, -1, "underpowered",
            "Nothing is settled: sparsity 0.7, the mildest, may cost less than 1 point or more",
        ),
        (
            {1: point(PASS) | point(PASS, kind="likelihood"), 2: point(PASS) | point(FAIL, 0.3, 0.2, 0.4, "likelihood")},
            1, "pass",
            "less than 1 point and 0.01 nats a token, shown with 640 questions in 40 contexts and 640 tokens of 40 documents; "
            "sparsity 0.9 loses 0.300 nats a token [0.200, 0.400].",
        ),
    ],
)  # fmt: skip
def test_the_answer_in_a_sentence(visited, passed, outcome, text, tmp_path):
    made = found(visited, passed, folder=tmp_path)
    assert text in answer.sentence(made) and made.outcome == outcome
    assert json.loads(json.dumps(answer.as_json(made)))["outcome"] == outcome
    answer_picture.draw(made, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_exit_codes(monkeypatch, capsys):
    for visited, passed, code in (({1: point(PASS)}, 1, 0), ({1: LOST, 0: LOST}, -1, 1), ({1: LOST, 0: HELD}, -1, 3)):
        monkeypatch.setattr(search, "search", lambda *args, v=visited, p=passed: found(v, p))
        with pytest.raises(SystemExit) as stop:
            cli.app(["run", "some.toml", "--search"])
        assert stop.value.code == code
    assert "640" in capsys.readouterr().out


@pytest.mark.parametrize("file,values", [("search_sparsity", 7), ("search_tiny_recall", 7)])
def test_the_files_that_come_with_kvlab_are_whole(file, values):
    for smoke in (False, True):
        asked, made = points.read(config.read(EXPERIMENTS / f"{file}.toml")[1], smoke=smoke)
        assert asked.path == "policy.selection.sparsity" and len(made) == (values if not smoke else len(asked.values))
        assert asked.values == sorted(asked.values)
        batches = points.Course(made[0].cells, asked.looks).batches
        assert batches <= 4 if smoke else batches > 40
