"""Why samples fail: what the loop says of the answers' tokens, the causes that follow from it, and how a run shows them."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import kvlab
from kvlab import decode, memory, parts
from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError
from kvlab.experiment import causes, config, picture, report
from kvlab.models import load
from kvlab.reading import GONE, READ, STORED
from kvlab.tasks import Mqar, Needle
from tests import tools

pytestmark = pytest.mark.compiled_quickly

POLICIES = {
    "full": {},
    "window": {"retention": {"name": "window", "size": 40, "sinks": 3}},
    "aligned window": {"retention": {"name": "window", "size": 40, "sinks": 3}, "codec": {"name": "int8", "scale": "channel"}},
    "pool": {"retention": {"name": "adakv", "inner": {"name": "snapkv", "size": 128}}},
    "streaming heads": {"retention": {"name": "random", "size": 90, "unit": 1}},
    "tokens": {"selection": {"name": "recency", "sparsity": 0.7, "recent": 8}},
    "pages": {"selection": {"name": "quest", "sparsity": 0.5, "recent": 8}, "layout": "page_major"},
    "coded pages": {"selection": {"name": "quest", "sparsity": 0.5}, "codec": {"name": "int8", "scale": "channel"}},
}


@pytest.mark.parametrize("name", POLICIES)
def test_followed_tokens_are_those_that_are_stored_and_read(tiny, rng, name):
    """Following every position must find as many read tokens as the step itself counts, and those that the cache holds."""
    engine, policy = decode.Engine(tiny), parts.policy(POLICIES[name])
    prompts = [rng.integers(0, 256, n).tolist() for n in (300, 190)]
    session = engine.start(engine.prefill(prompts, decode.needs([policy])), policy, 4, forced=[[1, 2], [3]])
    every = np.tile(np.arange(304), (2, 1)).astype(np.int32)
    steps = session.run(1, ["reads"], every)
    session.run(1)
    found = np.asarray(steps.followed[0])
    np.testing.assert_array_equal((found == READ).sum(-1), steps.reads[0])
    again = session.run(1, ["reads"], every)
    for layer, (made, cache) in enumerate(zip(session.policies, session.state.caches)):
        pos = np.asarray(memory.positions(made, cache)).reshape(2, 2, -1)
        held = (pos[..., None] == every[:, None, None]).any(2)
        np.testing.assert_array_equal(np.asarray(again.followed[0, layer]) != GONE, held)
    reads_less = not policy.selection.reads_all
    assert (found == STORED).any() == reads_less and (found == READ).any() and (found == GONE).any()


def test_positions_to_follow_are_checked(tiny):
    engine = decode.Engine(tiny)
    session = engine.start(engine.prefill([[1, 2, 3]]), parts.policy({}), 2)
    with pytest.raises(ConfigError, match=r"follow has the shape \(2, 1\); give \[1, W\]"):
        session.run(1, (), np.zeros((2, 1), np.int32))
    assert session.run(1).followed is None
    assert np.asarray(session.run(1, (), np.array([[1, -1]], np.int32)).followed)[0, :, 0].tolist() == [[[READ, GONE]] * 2] * 2


@pytest.mark.parametrize("known", [False, True])
def test_a_needles_span_holds_its_number(known):
    task = Needle(length=400, needles=4, contexts=1, text="stdlib", known=known)
    tokenizer = tools.Bytes()
    tokenizer.begin = [7]
    batch = task.batch(0, 5, tokenizer)
    for row, (first, end), number in zip(batch.rows, batch.spans, batch.targets):
        assert tokenizer.decode(batch.prompts[row][first:end]) == number


class Pairs(tools.Bytes):
    """A tokenizer that merges characters two by two, so that numbers share tokens with their neighbours."""

    def encode(self, text):
        return [256 * ord(a) + ord(b) for a, b in zip(text[::2], text[1::2] + "\0")]

    def decode(self, ids):
        return "".join(chr(i // 256) + chr(i % 256) for i in ids)


def test_a_span_takes_in_tokens_that_hold_a_part_of_the_number():
    batch = Needle(length=400, needles=3, contexts=1, text="stdlib").batch(0, 0, Pairs())
    for (first, end), number in zip(batch.spans, batch.targets):
        assert number in Pairs().decode(batch.prompts[0][first:end]) and end - first == 3


def test_a_pairs_span_holds_its_value():
    model = load("tiny-recall")
    batch = Mqar(length=128, pairs=8, queries=8, contexts=1).batch(0, 0, model.tokenizer)
    for (first, end), target in zip(batch.spans, batch.targets):
        assert model.tokenizer.decode(batch.prompts[0][first:end]).strip() == target


@part
class Coarse(Codec):
    """Whole multiples of `step`: tiny-recall takes no notice of 2-bit codecs, so this one is coarser."""

    step: float = static(default=6.0)

    def encode(self, x, pos=None):
        return {"x": jnp.round(x / self.step).astype(jnp.int8)}

    def decode(self, code, pos=None):
        return code["x"].astype(jnp.float32) * self.step

    def page_bytes(self, dim):
        return PAGE * dim


def share(kept, read, correct=False):
    return {"correct": correct, "kept_share": kept, "read_share": read}


@pytest.mark.parametrize(
    "row,model,rounded,want",
    [
        (share(0.0, 0.0, True), False, True, None),
        (share(0.0, 0.0), True, True, "model"),
        (share(0.49, 0.49), False, True, "evicted"),
        (share(0.5, 0.49), False, True, "unread"),
        (share(1.0, 1.0), False, True, "misquantised"),
        (share(1.0, 1.0), False, False, "unclear"),
        (share(0.9, 0.9), False, True, "unclear"),
        (share(1.0, 0.9), False, True, "unclear"),
    ],
)
def test_the_first_cause_that_holds_is_named(row, model, rounded, want):
    assert causes.cause(row, model, rounded) == want


RECALL = {
    "name": "recall",
    "question": "where were the pairs lost?",
    "base": {
        "model": {"name": "tiny-recall"},
        "task": {"name": "mqar", "length": 192, "contexts": 2, "pairs": 32, "queries": 32},
    },
    "grid": {
        "policy": [
            {"label": "window", "retention": {"name": "window", "size": 48, "sinks": 4}},
            {"label": "recency", "selection": {"name": "recency", "sparsity": 0.75, "sinks": 0, "recent": 1}},
            {"label": "coarse", "codec": {"name": "tests.test_causes:Coarse"}},
            {"label": "full"},
        ]
    },
}


@pytest.fixture(scope="module")
def recalled(tmp_path_factory):
    out = tmp_path_factory.mktemp("recall")
    frame = kvlab.run(RECALL, out=out)
    return frame.set_index("policy"), kvlab.results.load(out / "recall"), out


def lost(samples, policy):
    mine = samples[(samples.policy == policy) & ~samples.correct.astype(bool)]
    return mine[mine.cause != "model"]


def test_a_window_evicts(recalled):
    """An answer is held by every head or by none: it lies in the window or before it."""
    _, samples, _ = recalled
    rows = samples[samples.policy == "window"]
    place = (rows.depth * 192).round() + 1
    inside = (place < 4) | (place > 192 - 48)  # the key that is asked for stands at 192
    assert (rows.kept_share == inside).all() and not rows.correct[~inside].all()
    assert set(lost(samples, "window").cause) == {"evicted"} and len(lost(samples, "window")) > 20


def test_a_selection_does_not_read(recalled):
    _, samples, _ = recalled
    wrong = lost(samples, "recency")
    assert (wrong.kept_share == 1).all() and (wrong.read_share == 0).all() and set(wrong.cause) == {"unread"} and len(wrong) > 20


def test_a_coarse_codec_misquantises(recalled):
    frame, samples, _ = recalled
    wrong = lost(samples, "coarse")
    assert set(wrong.cause) == {"misquantised"} and len(wrong) > 5
    assert frame.loc["coarse", "kept_share"] == frame.loc["coarse", "read_share"] == 1


def test_what_the_full_cache_gets_wrong_is_the_models(recalled):
    _, samples, _ = recalled
    of = {p: s.sort_values(["batch", "sample"]).reset_index() for p, s in samples.groupby("policy")}
    full = of["full"]
    assert (full.cause[~full.correct.astype(bool)] == "model").all() and full.cause[full.correct.astype(bool)].isna().all()
    for rows in of.values():
        assert ((rows.cause == "model") == (~rows.correct.astype(bool) & ~full.correct.astype(bool))).all()


def test_without_a_full_cache_in_the_grid_causes_are_the_same(recalled, tmp_path, capsys):
    """Nor does it matter where the grid has it; a run that is resumed asks what is on disk."""
    _, samples, _ = recalled
    alone = {**RECALL, "grid": {"policy": RECALL["grid"]["policy"][:1]}}
    kvlab.run(alone, out=tmp_path)
    rows = kvlab.results.load(tmp_path / "recall")
    assert rows.cause.tolist() == samples[samples.policy == "window"].cause.tolist()
    shown = capsys.readouterr().out
    assert "why answers were lost" in shown and "evicted" in shown


def test_causes_are_counted_by_policy(recalled):
    _, samples, out = recalled

    made = causes.table(config.expand(config.read(RECALL)[1]), out / "recall")
    assert list(made) == ["window", "recency", "coarse", "full"]
    for policy, counts in made.items():
        rows = samples[samples.policy == policy]
        assert counts["samples"] == 64 and sum(counts[c] for c in causes.CAUSES) == (~rows.correct.astype(bool)).sum()


def test_a_question_in_the_prompt_leaves_its_answer_to_be_followed_from_the_first_step(on_tiny, tmp_path):
    task = {"name": "needle", "length": 300, "contexts": 1, "needles": 2, "new_tokens": 3, "text": "stdlib", "known": True}
    window = {"label": "window", "retention": {"name": "window", "size": 130, "sinks": 0}}
    kvlab.run({"name": "k", "question": "?", "base": {"model": {"name": "tiny"}, "task": task, "policy": window}}, out=tmp_path)
    rows = kvlab.results.load(tmp_path / "k")
    assert rows.kept_share.tolist() == rows.read_share.tolist() == [0, 1]


# ----------------------------------------------------------------------------------------------------------- the picture


def frame_of(**columns):
    count = len(next(iter(columns.values())))
    return pd.DataFrame({"policy": [f"p{i}" for i in range(count)], "accuracy": [0.5] * count, **columns})


def test_the_picture_shows_the_bytes_that_differ():
    assert picture.axis(frame_of(resident_bytes=[100.0, 50.0], read_bytes=[100.0, 20.0])) == "resident_bytes"
    assert picture.axis(frame_of(resident_bytes=[100.0, 106.0], read_bytes=[100.0, 20.0])) == "read_bytes"
    assert picture.axis(frame_of(resident_bytes=[100.0, 100.0])) == "resident_bytes"


def test_a_methods_budgets_are_one_line_with_room_on_the_right(tmp_path):
    from matplotlib.figure import Figure

    frame = frame_of(resident_bytes=[4e6, 1e6, 2e6, 1e6])
    frame["policy"] = ["full", "snapkv, 25 %", "snapkv, 50 %", "gate 0.65"]
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        real = Figure.savefig
        patch.setattr(Figure, "savefig", lambda self, *a, **k: kept.append(self) or real(self, *a, **k))
        picture.draw(frame, tmp_path / "p.png")
    (place,) = kept[0].axes
    assert [text.get_text() for text in place.get_legend().get_texts()] == ["full", "snapkv", "gate 0.65"]
    assert place.lines[1].get_xdata().tolist() == [1, 2] and place.get_xlim()[1] > 4.2
    assert picture.draw(frame[["policy", "resident_bytes"]], tmp_path / "none.png") is None


def test_a_part_inside_a_part_is_named_in_words():
    inner = {"name": "keydiff", "ratio": 0.5}
    assert parts.describe({"retention": {"name": "protect", "inner": inner}}) == "protect keydiff ratio 0.5"
    wrapped = {"retention": {"name": "protect", "inner": {"name": "adakv", "inner": "kvzip"}, "sinks": 2}}
    assert parts.describe(wrapped) == "protect adakv kvzip sinks 2"


def test_tasks_of_a_kind_stand_side_by_side():
    """A policy's row is a mean over tasks, so each task's own accuracy is shown, under what sets the tasks apart."""
    task = {"name": "mqar", "length": 128, "contexts": 1, "pairs": 8, "queries": 4}
    cells = [config.Cell({"name": "m"}, {**task, "queries": q}, {"label": p}) for p in "ab" for q in (4, 8)]
    table = pd.DataFrame({"policy": ["a", "a", "b", "b"], "seed": 0, "accuracy": [0.1, 0.2, 0.3, 0.4]})
    shown = report.by_task(table, cells)
    assert [c.header for c in shown.columns] == ["policy", "queries 4", "queries 8"]
    assert [list(c.cells) for c in shown.columns[1:]] == [["0.100", "0.300"], ["0.200", "0.400"]]
    assert report.by_task(table[:1], cells[:1]) is None
