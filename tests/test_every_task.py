"""What holds for every task: its samples, the axes of its fields, its marks and its refusals."""

import dataclasses
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvlab.errors import ConfigError
from kvlab.experiment import config
from kvlab.tasks import TASKS, Answers
from kvlab.tasks.mqar import WORDS
from tests.tools import Bytes

FILES = ("argparse.py", "inspect.py", "tarfile.py", "zipfile.py", "textwrap.py", "difflib.py")  # of the standard library


class Start(Bytes):
    """Bytes with a token before every prompt."""

    begin = [7]


class Vocabulary(Bytes):
    """The words of `mqar`."""

    def encode(self, text):
        return [WORDS.index(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(WORDS[i] for i in ids)


class Spec(NamedTuple):
    """What to try a task with, which of its fields move what, and fields that it must refuse."""

    fields: dict[str, Any]
    harder: tuple[str, Any, str] | None  # a field, a harder value, and what there is more of: a measure below
    refused: dict[str, Any]  # field → a value that is not allowed
    fills: bool = True  # contexts have exactly `length` tokens
    deep: bool = True  # has a field `depth`
    spans: bool = True
    wrong: str = " nothing of the kind"


SPECS = {
    "needle": Spec({"needles": 3, "length": 800}, ("distractors", 6, "sentences"), {"needles": 0, "asked": 2, "distractors": 99}),
    "passkey": Spec({}, ("digits", 30, "target"), {"digits": 0, "contexts": 0}),
    "key_value": Spec(
        {"pairs": 20, "queries": 2, "length": 1200}, ("pairs", 40, "pairs"), {"alike": 5, "queries": 21, "pairs": 0}, fills=False
    ),
    "mqar": Spec({"pairs": 8, "queries": 4, "length": 200}, ("pairs", 20, "keys"), {"pairs": 101, "queries": 9}, deep=False),
    "variable_tracking": Spec({"chains": 2, "hops": 1}, ("hops", 2, "sentences"), {"hops": 4, "chains": 0, "length": 20}),
    "majority": Spec({"votes": 9}, ("votes", 15, "votes"), {"colours": 1, "share": 0.4}, deep=False, spans=False),
    "common_words": Spec({"often": 8}, ("seldom", 6, "repeats"), {"often": 2, "common": 0}, False, deep=False, spans=False),
    "frequent_words": Spec({"words": 20}, ("words", 40, "different"), {"top": 20, "words": 1}, False, deep=False, spans=False),
    "repeated_copy": Spec({}, ("words", 16, "target"), {"times": 0, "words": 0, "length": 70}),
    "cloze": Spec({"gaps": 4, "text": "licences"}, ("cue", 3, "shorter questions"), {"gaps": 0, "cue": 0}),
    "next_identifier": Spec({}, None, {"depth": 0.95, "mentions": 0}),
    "next_line": Spec({}, None, {"depth": 0.95, "mentions": 0}, spans=False),
    "dialogue": Spec({"facts": 2, "turn": 40}, ("facts", 5, "facts"), {"facts": 0, "turn": 0}, fills=False),
    "facts_and_figures": Spec({"new_tokens": 8}, ("new_tokens", 16, "steps"), {"new_tokens": 0}, deep=False, spans=False),
    "continuation": Spec({"new_tokens": 8}, ("new_tokens", 16, "steps"), {"samples": 0}, deep=False, spans=False),
    "likelihood": Spec({"continuation": 8}, ("continuation", 16, "steps"), {"continuation": 1}, deep=False, spans=False),
    "jsonl": Spec({}, ("length", 400, "shorter"), {"contexts": 4, "new_tokens": 0}, fills=False, deep=False, spans=False),
}
MEASURES = {
    "sentences": lambda text, batch: text.count("The magic number for"),
    "votes": lambda text, batch: text.count("The vote of"),
    "pairs": lambda text, batch: text.count('": "'),
    "keys": lambda text, batch: sum(word[0] == "k" for word in text.split()),
    "facts": lambda text, batch: text.count("Please remember"),
    "target": lambda text, batch: len(batch.targets[0]),
    "repeats": lambda text, batch: -len(set(text.split(", "))),
    "different": lambda text, batch: len(set(text.split(", "))),
    "shorter questions": lambda text, batch: -sum(map(len, batch.forced)),
    "shorter": lambda text, batch: -len(batch.prompts[0]),
    "steps": lambda text, batch: batch.new_tokens,
}


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Options that name text: a folder of some modules of the standard library, and a file of questions."""
    folder = tmp_path_factory.mktemp("texts")
    for name in FILES:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / name, folder / f"{name}.txt")
    line = lambda i, n: {
        "context": f"The river {i} is long. " * 40,
        "question": f"\n\nWhat is river {n}?",
        "answers": ["long", "wet"],
    }
    own = folder / "own.jsonl"
    own.write_text("\n".join(json.dumps(line(*pair)) for pair in ((0, 0), (1, 0), (0, 1), (2, 0))))
    return {"text": str(folder), "path": str(own)}


def tokens(name):
    return Vocabulary() if name == "mqar" else Start()


@pytest.fixture
def make(texts):
    def made(name, **changes):
        fields = {field.name for field in dataclasses.fields(TASKS[name])}
        common = {"length": 700, "contexts": 2, **texts, **SPECS[name].fields, **changes}
        return TASKS[name](**{key: value for key, value in common.items() if key in fields})

    return made


def same(a, b):
    return (a.prompts, a.forced, a.targets, a.facts, a.spans) == (b.prompts, b.forced, b.targets, b.facts, b.spans)


def test_every_task_is_tried():
    assert set(SPECS) == set(TASKS) and all(
        "context    " in task.__doc__ or "prompt    " in task.__doc__ for task in TASKS.values()
    )


@pytest.mark.parametrize("smoke", [False, True])
def test_an_experiment_has_them_all_but_those_that_need_another_model_or_a_file(smoke):
    _, experiment = config.read(Path(__file__).parents[1] / "experiments" / "tasks.toml")
    cells = config.expand(experiment, smoke=smoke)
    assert {cell.task["name"] for cell in cells} == set(TASKS) - {"mqar", "jsonl"}


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_a_function_of_fields_seed_and_number(name, make):
    task, last = make(name), make(name).count() - 1
    batch = make(name).batch(last, 5, tokens(name))  # alone, before any other
    assert [same(task.batch(i, 5, tokens(name)), batch) for i in range(last + 1)] == [False] * last + [True]
    others = [make(name).batch(last, seed, tokens(name)) for seed in (6, 7, 8)]
    assert not all(same(batch, other) for other in others)


@pytest.mark.parametrize("name", TASKS)
def test_samples_have_one_form(name, make):
    task = make(name)
    batch = task.batch(0, 1, tokens(name))
    n = len(batch.rows)
    assert n == len(batch.forced) == len(batch.facts) == len(batch.targets) and len(batch.spans) in (0, n)
    assert set(batch.rows) == set(range(len(batch.prompts))) and batch.new_tokens >= max(1, *map(len, batch.forced))
    assert all(ids[: len(tokens(name).begin)] == tokens(name).begin and len(ids) <= task.length for ids in batch.prompts)
    assert not SPECS[name].fills or {len(ids) for ids in batch.prompts} == {task.length}
    assert all("context" in fact for fact in batch.facts) and bool(batch.spans) == SPECS[name].spans
    assert {"depth"} <= set(batch.facts[0]) or not SPECS[name].deep


@pytest.mark.parametrize("name", [name for name in TASKS if SPECS[name].spans])
@pytest.mark.parametrize("known", [False, True])
def test_a_span_holds_the_target_and_the_question_does_not(name, known, make):
    batch = make(name, known=known).batch(1, 2, tokens(name))
    text = tokens(name).decode
    for row, span, target, fact, forced in zip(batch.rows, batch.spans, batch.targets, batch.facts, batch.forced):
        assert text(batch.prompts[row][slice(*span)]) == target and abs(fact["depth"] - span[0] / len(batch.prompts[row])) < 0.1
        assert target not in text(forced)


@pytest.mark.parametrize("name", [name for name in TASKS if "known" in TASKS[name].__dataclass_fields__])
def test_a_known_question_ends_the_prompt_and_an_unknown_one_is_nowhere_in_it(name, make):
    apart, known = (make(name, known=known).batch(0, 3, tokens(name)) for known in (False, True))
    assert len(known.prompts) == len(known.rows) == len(apart.rows) and not any(known.forced) and all(apart.forced)
    assert len(apart.prompts) == 1 and known.new_tokens + max(map(len, apart.forced)) >= apart.new_tokens
    own = name in ("mqar", "cloze")  # the question's words are the context's own, and cloze finds others in a shorter context
    for prompt, question in zip(known.prompts, apart.forced):
        assert prompt[-len(question) :] == question or name == "cloze"
        assert own or tokens(name).decode(question) not in tokens(name).decode(apart.prompts[0])


@pytest.mark.parametrize("name", [name for name in TASKS if SPECS[name].deep])
def test_depth_moves_what_is_asked_for(name, make):
    for depth in (0.1, 0.5, 0.8):
        batch = make(name, depth=depth, length=2000).batch(0, 4, tokens(name))
        assert all(abs(fact["depth"] - depth) < 0.15 for fact in batch.facts)


@pytest.mark.parametrize("name", [name for name in TASKS if SPECS[name].harder])
def test_a_harder_task_has_more_of_what_makes_it_hard(name, make):
    field, value, measure = SPECS[name].harder
    easy, hard = (make(name, **changes).batch(0, 1, tokens(name)) for changes in ({}, {field: value}))
    count = lambda batch: MEASURES[measure](tokens(name).decode(batch.prompts[0]), batch)
    assert count(hard) > count(easy)


@pytest.mark.parametrize("name", [name for name in TASKS if not (TASKS[name].compares_logits or TASKS[name].compares_answers)])
def test_the_right_answer_counts_and_a_wrong_one_does_not(name, make):
    task = make(name)
    batch = task.batch(0, 1, tokens(name))
    right = task.score(batch, Answers([f" {task.written(target)}" for target in batch.targets]))
    wrong = task.score(batch, Answers([SPECS[name].wrong] * len(batch.targets)))
    empty = task.score(batch, Answers([""] * len(batch.targets)))
    assert [[row["correct"] for row in rows] for rows in (right, wrong, empty)] == [
        [w] * len(right) for w in (True, False, False)
    ]
    assert task.summary(right)["accuracy"] == 1 and task.summary(empty)["accuracy"] == 0
    assert task.summary(right + empty)["samples"] == 2 * len(right) and all(json.dumps(row) for row in right)


REFUSED = [
    (name, field, value) for name, spec in SPECS.items() for field, value in {"length": 0, "contexts": 0, **spec.refused}.items()
]


@pytest.mark.parametrize("name,field,value", REFUSED)
def test_a_field_that_cannot_be_is_refused(name, field, value, make):
    with pytest.raises(ConfigError, match=rf"{name}: .*(allowed: |give at least|give a share)"):
        make(name, **{field: value})
