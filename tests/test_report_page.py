"""`kvlab report`: one page from a results folder, made on tiny-recall; what it says is worked out again from the samples."""

import json
import shutil
import struct
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tomli_w

import kvlab
from kvlab import cli
from kvlab.errors import ConfigError, ResultsError
from kvlab.experiment import config, picture, store
from kvlab.experiment.regression import judge
from kvlab.experiment.regression.judge import Finding
from kvlab.report import data, depths, kept, origin, page, samples, tensorboard, verdicts

WINDOW = 'a "window" <b>of</b> $64$ & 4'
TASK = {"name": "mqar", "length": 256, "contexts": 3, "pairs": 24, "queries": 16}
RUN = {
    "name": "page",
    "question": "What does a window lose <script>alert(1)</script>?",
    "expect": "All but a quarter of the answers.",
    "base": {"model": {"name": "tiny-recall"}},
    "zip": {"task": [TASK, {**TASK, "length": 512}], "seed": [0, 1]},
    "grid": {
        "policy": [
            {"label": "full"},
            {"label": WINDOW, "retention": {"name": "window", "size": 64, "sinks": 4}},
            {"label": "INT8", "codec": "int8"},
        ],
    },
    "verdict": {"accuracy_margin": 0.02},
}
SECTIONS = ["verdict", "bytes", "table", "depth", "layers", "text", "samples", "origin"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    kvlab.run(RUN, ["task.contexts=2"], out=out)
    return out / "page"


@pytest.fixture(scope="module")
def html(folder):
    path, _ = page.write(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


class Seen(HTMLParser):
    """Attributes of every element, what stands in table heads of rows, and the script elements by id."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.scripts, self._open = [], [], {}, []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, text):
        tag, attrs = self._open[-1] if self._open else ("", {})
        if tag == "script" and "id" in attrs:
            self.scripts[attrs["id"]] = self.scripts.get(attrs["id"], "") + text
        self.words.append((tag, attrs, text.strip()))

    def all(self, tag, **attrs):
        return [found for name, found in self.elements if name == tag and attrs.items() <= found.items()]


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / folder.name)


def without_origin(folder, tmp_path):
    """As an older kvlab left it."""
    old = copied(folder, tmp_path)
    (old / "experiment.toml").unlink()
    for path in old.glob("*/samples/*.json"):
        batch = json.loads(path.read_text())
        rows = [{k: v for k, v in row.items() if k not in ("span", "question")} for row in batch["rows"]]
        path.write_text(json.dumps({**batch, "rows": rows}))
    for run in list(old.glob("*/config.toml")):
        run.parent.rename(old / f"old{run.parent.name[:6]}")  # another hash
    return old


# ---------------------------------------------------------------------------------------------------------- the page


def test_every_section_is_there_in_order_with_every_policy(html):
    seen = Seen(html)
    assert [attrs["id"] for attrs in seen.all("section")] == SECTIONS
    assert [attrs["data-sort"] for attrs in seen.all("th", scope="row") if "data-sort" in attrs] == ["full", WINDOW, "INT8"]
    labels = [text for _, attrs, text in seen.words if attrs.get("class") == "label"]
    assert labels == ["full", WINDOW, "INT8"]
    text = " ".join(words for _, _, words in seen.words)
    assert RUN["expect"] in text and "alert(1)" in text and "2 points of accuracy" in text
    assert "kvlab run" in text and "--set task.contexts=2" in text


def test_the_page_needs_nothing_from_outside(html, folder):
    seen = Seen(html)
    links = [value for _, attrs in seen.elements for name, value in attrs.items() if name.rpartition(":")[2] in ("src", "href")]
    assert links and all(link.startswith(("#", "data:,")) for link in links)
    assert "@import" not in html and all(part.startswith("#") for part in html.split("url(")[1:])
    assert {path.name for path in folder.glob("report-*.png")} == {"report-bytes.png", "report-layers.png"}
    ids = [attrs["id"] for _, attrs in seen.elements if "id" in attrs]
    linked = {link[1:] for link in links if len(link) > 1 and link[0] == "#"} | {
        p.split(")")[0][1:] for p in html.split("url(")[1:]
    }
    assert linked <= set(ids), linked - set(ids)


def test_labels_and_texts_are_escaped_wherever_they_stand(html):
    assert "<b>of" not in html and "<script>alert" not in html
    seen = Seen(html)
    assert json.loads(seen.scripts["kept-data"])["policies"][1] == WINDOW
    assert {text for tag, _, text in seen.words if tag == "option"} >= {WINDOW, "INT8"}
    svg = [text for tag, _, text in seen.words if tag == "text"]
    assert WINDOW in svg, "a legend's label is a plain text of the picture, no formula"


def test_the_shading_is_the_share_of_heads_that_hold_a_token(html, folder):
    made = json.loads(Seen(html).scripts["kept-data"])
    frame = kvlab.results.load(folder, "kept")
    first = made["prompts"][0]
    for index, label in enumerate(made["policies"]):
        own = frame[(frame.policy == label) & (frame.batch == 0)]
        own = own[[len(first["tokens"]) >= max(p, default=0) for p in own.kept_positions]]
        held = np.zeros(256)
        heads = own.iloc[:4]  # two layers of two heads: the first task's
        for positions in heads.kept_positions:
            held[positions] += 0.25
        last = len(made["levels"]) - 1
        levels = np.array([made["levels"].index(level) for level in first["shade"][str(index)]])
        assert len(heads) == 4 and np.abs(levels / last - held).max() < 0.01
        assert first["mean"][str(index)] == pytest.approx(held.mean(), abs=1e-4)
        assert (levels == 0).sum() == {0: 0, 1: 256 - 68, 2: 0}[index]
    assert len(first["tokens"]) == 256 and first["apart"]
    assert len(first["evidence"]) == 16
    for each in first["evidence"]:
        assert "".join(first["tokens"][each["span"][0] : each["span"][1]]).strip() == each["target"]
        assert set(each["right"]) == {"0", "1", "2"}


def test_levels_say_all_and_none_only_where_it_is_so():
    made = kept.levels(np.array([0, 1e-4, 0.5, 1 - 1e-4, 1]))
    assert [kept.LEVELS.index(level) for level in made] == [0, 1, 30, 60, 61]
    held = np.array([[[0, 1, -1], [1, 2, 7]]])  # one layer, two heads; 7 came after the prompt
    assert kept.shares(held, 4).tolist() == [0.5, 1, 0.5, 0]


def test_texts_are_of_policies_that_the_page_holds(tmp_path):
    """The second seed was run with a policy only that the page has no room for."""
    cells = [config.Cell({"name": "m"}, {"name": "needle"}, {"label": label}, seed=i) for i, label in enumerate("ab")]
    for cell in cells:
        (tmp_path / cell.run_id / "samples").mkdir(parents=True)
        np.savez(tmp_path / cell.run_id / "samples" / "00000.npz", kept=np.zeros((2, 1, 1, 4), int))
    results = SimpleNamespace(cells=cells, folder=tmp_path)
    assert kept._chosen(results, ["a"]) == [(cells[0].group, 0, 0), (cells[0].group, 0, 1)]


def test_lost_and_gained_are_counted_over_all_samples(html, folder):
    counts = json.loads(Seen(html).scripts["samples-data"])
    wide = kvlab.results.load(folder).assign(length=lambda f: [held[0][0].max() for held in f.kept_positions])
    wide = wide.pivot_table("correct", ["length", "batch", "sample"], "policy", aggfunc="first").astype(bool)
    assert len(wide) == 64
    for count, label in zip(counts, (WINDOW, "INT8")):
        lost, gained = (wide["full"] & ~wide[label]).sum(), (~wide["full"] & wide[label]).sum()
        assert count == {"all": 64, "lost": lost, "gained": gained}
    assert counts[0]["lost"] > 20
    rows = Seen(html).all("tr", **{"data-policy": "0"})
    assert len(rows) == samples.EACH and sum(row["data-kind"] == "lost" for row in rows) >= min(counts[0]["lost"], 30)


def test_a_sample_says_what_was_asked_expected_and_answered(folder):
    shown = samples.shown(data.read(folder))
    assert [each.label for each in shown] == [WINDOW, "INT8"]
    lost = shown[0].rows[0]
    assert lost.kind == "lost" and lost.right is False and lost.full.strip() == lost.expected != lost.answer.strip()
    assert lost.question.startswith("k") and lost.cause == "evicted" and lost.where.startswith("mqar, ")


def test_few_rows_make_room_for_the_lost_first():
    row = lambda kind: samples.Sample("", "", "", "", None, None, kind, "")
    many = [row("same")] * 30 + [row("gained")] * 9 + [row("lost")] * 3
    picked = [each.kind for each in samples._pick(many, 12)]
    assert picked == ["lost"] * 3 + ["gained"] * 6 + ["same"] * 3


def test_heat_maps_hold_every_answer_once(folder):
    results = data.read(folder)
    (made,) = depths.maps(results)
    assert made.task == "mqar" and list(made.policies) == ["full", WINDOW, "INT8"]
    for label, lengths in made.policies.items():
        spots = [spot for row in lengths.values() for spot in row if spot]
        assert list(lengths) == [256, 512] and sum(spot.samples for spot in spots) == 64
        assert sum(spot.right for spot in spots) == sum(row["correct"] for row in results.rows[label].values())
        assert all(spot.low <= spot.share <= spot.high and spot.contexts <= 2 for spot in spots)
    deep = lambda label: made.policies[label][512][-1].share
    assert deep("full") > 0.8 and made.policies[WINDOW][512][1].share < 0.3 < deep(WINDOW)


def test_verdicts_are_the_tables_and_say_why(folder):
    results = data.read(folder)
    made = {each.label: each for each in verdicts.judged(results)}
    table = results.frame.set_index("policy")["verdict"]
    assert {label: each.outcome for label, each in made.items()} == table.to_dict()
    assert made[WINDOW].outcome == "fail" and made["full"].outcome == "reference"
    ((rule, _, words),) = made[WINDOW].lines
    assert rule == "answers" and words.startswith("The loss is larger than 2 points: −") and "64 questions in 4 contexts" in words
    found = {"margin": 0.01, "difference": -0.042, "low": -0.128, "high": 0.024, "items": 120, "clusters": 12, "reason": ""}
    found |= {"items_needed": 2400.0, "clusters_needed": 240.0, "minimum_detectable_effect": 0.093}
    assert verdicts.words(Finding("answers", "p", judge.OPEN, "", found)) == (
        "Too few samples to say whether 1 point or more is lost: −4.2\xa0[−12.8,\xa0+2.4]\xa0points, of 120 questions in 12 "
        "contexts. These settle 9.3 points; a margin of 1 point takes 2,400 questions in 240 contexts."
    )
    flat = {**found, "items_needed": np.inf, "reason": "1 cluster: how clusters differ cannot be seen"}
    assert verdicts.words(Finding("answers", "p", judge.OPEN, "", flat)).endswith(
        "It takes more than one of the contexts. 1 cluster: how clusters differ cannot be seen."
    )
    nats = {**found, "difference": 0.001, "low": -0.002, "high": 0.004}
    assert "A loss of 0.01 nats a token or more is excluded: +0.0010\xa0[−0.0020,\xa0+0.0040]" in verdicts.words(
        Finding("likelihood", "p", judge.PASS, "", nats)
    )


def test_a_check_is_reported_by_its_own_findings(folder, tmp_path):
    checked = copied(folder, tmp_path)
    found = [{"rule": "worst case", "policy": "INT8", "outcome": "fail", "text": "the <weakest> cell", "figures": {}}]
    (checked / "check.json").write_text(json.dumps({"findings": found}))
    made = {each.label: each for each in verdicts.judged(data.read(checked))}
    assert made["INT8"].lines == [("worst case", "fail", "the <weakest> cell")] and made["INT8"].outcome == "fail"
    assert made[WINDOW].lines[0][0] == "answers", "what no rule was asked of is judged as in a run"


def test_the_front_is_what_no_other_policy_beats():
    frame = pd.DataFrame(
        {
            "policy": ["full", "good", "worse", "dear", "twin", "gone"],
            "resident_bytes": [100, 30, 30, 60, 30, 1],
            "accuracy": [0.9, 0.8, 0.5, 0.8, 0.8, np.nan],
        }
    )
    assert picture.front(frame, "accuracy") == ["full", "good", "twin"]
    assert picture.front(frame.rename(columns={"accuracy": "kl_mean"}), "kl_mean") == ["worse"]


def test_the_table_has_intervals_and_sorts_by_the_figure(html, folder):
    results = data.read(folder)
    rows = {label: figures for label, _, figures in page.table(results.frame)}
    accuracy = results.frame.set_index("policy")["accuracy"]
    figure = rows[WINDOW]["accuracy"]
    assert figure.text == f"{accuracy[WINDOW]:.3f}" and figure.more.startswith("[0.") and figure.sort == accuracy[WINDOW]
    assert rows[WINDOW]["accuracy_difference"].text.startswith("−") and rows[WINDOW]["verdict"].text == "fail"
    assert "read_ratio" in results.frame and page.columns(results.frame)["accuracy_difference"] == "against full, points"


# ------------------------------------------------------------------------------------------------- folders of other kinds


def test_a_folder_without_its_experiment_still_makes_a_page(folder, tmp_path):
    old = without_origin(folder, tmp_path)
    path, figures = page.write(old, tmp_path / "elsewhere.html")
    text = path.read_text()
    assert [attrs["id"] for attrs in Seen(text).all("section")] == SECTIONS
    assert figures["question"] == "" and set(figures["policies"]) == {"full", WINDOW, "INT8"}
    assert "not found in the folder" in text and "1 point of accuracy" in text and "none is underlined" in text
    assert "no experiment.toml" in text and str(old / "old") in text and (tmp_path / "elsewhere-bytes.png").exists()
    assert samples.shown(data.read(old))[0].rows[0].question.startswith("key k")


def test_only_the_cells_of_the_last_run_are_reported(folder, tmp_path):
    some = copied(folder, tmp_path)
    kvlab.run({**RUN, "zip": {}, "grid": {**RUN["grid"], "task": [TASK]}}, ["task.contexts=2"], out=tmp_path)
    assert len(list(some.glob("*/config.toml"))) == 6 and len(data.read(some).cells) == 3


def test_unfinished_cells_are_left_out_and_named(folder, tmp_path):
    half = copied(folder, tmp_path)
    int8 = [cell.run_id for cell in data.read(half).cells if cell.label == "INT8"]
    for run in int8:
        (half / run / "summary.json").unlink()
    results = data.read(half)
    assert results.unfinished == 2 and list(results.rows) == ["full", WINDOW]
    assert "2 more cells are not finished" in page.write(half)[0].read_text()
    for path in half.glob("*/summary.json"):
        path.unlink()
    with pytest.raises(ResultsError, match="6 cells and none is finished; run the experiment again"):
        page.write(half)
    with pytest.raises(ResultsError, match="holds no runs; give results/<experiment>"):
        page.write(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match="is a folder; give a file, such as"):
        page.write(folder, tmp_path)


@pytest.mark.parametrize("policies", [[{"label": "full"}], [{"label": "INT8", "codec": "int8"}]])
def test_one_policy_alone(policies, tmp_path):
    """The full cache, or another without it: nothing to compare with."""
    kvlab.run({**RUN, "zip": {}, "grid": {"task": [TASK], "policy": policies}}, out=tmp_path)
    path, figures = page.write(tmp_path / "page")
    outcome = {"full": "reference", "INT8": "no reference"}[policies[0].get("label")]
    assert [each["outcome"] for each in figures["verdicts"].values()] == [outcome]
    assert Seen(path.read_text()).all("section")[-1]["id"] == "origin"


def test_likelihood_alone_has_drift_and_no_samples(on_tiny, tmp_path):
    task = {"name": "likelihood", "length": 128, "contexts": 3, "continuation": 8, "text": "stdlib"}
    window = {"label": "window", "retention": {"name": "window", "size": 60, "sinks": 4}}
    grid = {"policy": [{"label": "full"}, window]}
    kvlab.run({"name": "text", "question": "?", "base": {"model": {"name": "tiny"}, "task": task}, "grid": grid}, out=tmp_path)
    path, figures = page.write(tmp_path / "text")
    text = path.read_text()
    assert [attrs["id"] for attrs in Seen(text).all("section")] == ["verdict", "bytes", "table", "layers", "text", "origin"]
    assert "drift of its output" in text and figures["verdicts"]["window"]["lines"][0][0] == "likelihood"
    assert list(figures["fronts"]) == ["kl_mean"]


# --------------------------------------------------------------------------------------------------- where it comes from


def test_experiment_toml_is_the_experiment_and_runs_as_it_stands(folder, tmp_path):
    name, again = config.read(folder / "experiment.toml")
    asked = config.expand(config.read(RUN)[1], ["task.contexts=2"])
    assert name == "page" and again.question == RUN["question"] and again.margins.accuracy_margin == 0.02
    assert again.origin.overrides == ["task.contexts=2"] and again.origin.source == ""
    assert again.origin.cells == [cell.run_id for cell in asked]
    assert [cell.run_id for cell in config.expand(again, again.origin.overrides)] == again.origin.cells
    with pytest.raises(ConfigError, match="unknown field .override. - at ..\\.origin"):
        config.read({**RUN, "origin": {"override": []}})


def test_a_cell_runs_alone_from_its_own_file(folder, tmp_path):
    run = data.read(folder).cells[1].run_id
    name, alone = config.read(folder / run / "config.toml")
    assert name == run and [cell.run_id for cell in config.expand(alone)] == [run]
    frame = kvlab.run(folder / run / "config.toml", out=tmp_path)
    summary = json.loads((folder / run / "summary.json").read_text())
    assert frame["accuracy"].tolist() == [summary["accuracy"]] and (tmp_path / run / run / "summary.json").exists()


def test_commands_name_file_overrides_and_cell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grid = {**RUN["grid"], "task": [TASK]}
    tables = {key: value for key, value in RUN.items() if key not in ("name", "zip")} | {
        "grid": grid,
        "smoke": {"task.contexts": 1},
    }
    (tmp_path / "my page.toml").write_text(tomli_w.dumps(tables))
    monkeypatch.setattr(sys, "argv", ["kvlab", "run", "my page.toml", "--smoke", "--set", "seed=5"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0 and "kvlab report 'results/my page-smoke'" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kvlab", "report", "results/my page-smoke", "--json", "page.json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0 and capsys.readouterr().out.strip() == "results/my page-smoke/report.html"
    made = origin.commands(data.read("results/my page-smoke"))
    assert made["whole"] == "kvlab run 'my page.toml' --set seed=5 --smoke --out reproduced"
    assert made["stored"] == "kvlab run 'results/my page-smoke/experiment.toml' --set seed=5 --smoke --out reproduced"
    figures = json.loads((tmp_path / "page.json").read_text())
    assert figures["verdicts"][WINDOW]["outcome"] and figures["policies"]["full"]["accuracy"] > 0.8
    assert figures["fronts"]["accuracy"] and figures["page"].endswith("report.html")


def test_a_folder_without_runs_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvlab", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: ") and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ TensorBoard


def scalars(folder):
    """(tag, step) → value of an event file: records of length, checksum, message, checksum."""
    from tensorboardX.proto import event_pb2

    made = {}
    (path,) = folder.glob("events.*")
    raw, at = path.read_bytes(), 0
    while at < len(raw):
        (size,) = struct.unpack("<Q", raw[at : at + 8])
        event = event_pb2.Event.FromString(raw[at + 12 : at + 12 + size])
        made |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += size + 16
    return made


def test_tensorboard_gets_the_table_the_layers_and_the_batches(folder, tmp_path):
    runs = tensorboard.write(folder, tmp_path)
    results = data.read(folder)
    assert len(runs) == 3 and all(run.parent == tmp_path for run in runs)
    seen = scalars(runs[1])
    row = results.frame.iloc[1]
    assert seen["figures/accuracy", 0] == pytest.approx(row["accuracy"])
    assert seen["figures/resident_bytes", 0] == row["resident_bytes"]
    entropy = kvlab.results.load(folder, "entropy")
    batches = entropy[entropy.policy == WINDOW].groupby(["layer"])["entropy"].mean()
    assert seen["layers/entropy", 1] == pytest.approx(batches[1], rel=1e-4)
    right = [value for (tag, _), value in seen.items() if tag.startswith("batches/") and tag.endswith("/accuracy")]
    assert len(right) == 4 and np.mean(right) == pytest.approx(row["accuracy"])


def test_names_of_tensorboard_runs_differ():
    assert list(tensorboard.names(["a b", "a/b", "a_b", "/"]).values()) == ["a_b", "a_b~2", "a_b~3", "policy"]


def test_tensorboard_without_its_library_says_how_to_get_it(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ResultsError, match="pip install tensorboardX"):
        tensorboard.write(folder, tmp_path)


def test_a_new_run_forgets_what_a_check_found(folder, tmp_path):
    (tmp_path / store.CHECK).write_text("{}")
    experiment = config.read(RUN)[1]
    store.write_experiment(tmp_path, "page", experiment, config.origin("run", RUN, [], False), [])
    assert not (tmp_path / store.CHECK).exists() and store.source(tmp_path) == "" == store.source(folder)
