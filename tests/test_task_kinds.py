"""What single tasks promise beyond what all of them do: needles' variants, code, conversations, one's own files, references."""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import kvlab
from kvlab.errors import ConfigError, ResultsError
from kvlab.experiment import causes
from kvlab.models import chat, load
from kvlab.tasks import (
    Answers,
    Cloze,
    CommonWords,
    Dialogue,
    FactsAndFigures,
    FrequentWords,
    Jsonl,
    KeyValue,
    Likelihood,
    Needle,
    NextIdentifier,
    NextLine,
    RepeatedCopy,
)
from kvlab.tasks.code import references
from kvlab.tasks.text import counts
from kvlab.train.gate import record
from tests.test_every_task import Start, texts  # noqa: F401
from tests.tools import Bytes

TEXT = "".join(f"Line {i} of a plain text, which is the same wherever it is read. " for i in range(99))


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text(TEXT)
    return str(path)


def content(batch):
    return Bytes().decode(batch.prompts[0])


# ------------------------------------------------------------------------------------------------------------- needles


@pytest.mark.parametrize(
    "fields,digest",
    [
        ({}, "f8592402aa95b0bcf94c06415af4c59fa8bc68ba9ae142a488139577247a8767"),
        (
            {"length": 600, "needles": 4, "depth": 0.3, "known": True},
            "a2d8dad60d706e3a7341356c05ce3184e7f21e65f7f6c247a9b077175de4969d",
        ),
    ],
)
def test_needles_are_those_of_all_results_so_far(plain, fields, digest):
    batch = Needle(text=plain, **fields).batch(1, 7, Bytes())
    made = json.dumps([batch.prompts, list(batch.rows), batch.forced, batch.new_tokens, batch.targets, batch.spans])
    assert hashlib.sha256(made.encode()).hexdigest() == digest


def test_several_numbers_of_a_needle_are_wanted_together(plain):
    task = Needle(length=2000, needles=2, values=3, distractors=4, text=plain)
    batch = task.batch(0, 0, Start())
    stated = re.findall(r"The magic number for (\w+) is (\d+)\. ", content(batch))
    assert len(stated) == 18 and len({name for name, _ in stated}) == 6 and batch.new_tokens > 24
    for fact, span, target, question in zip(batch.facts, batch.spans, batch.targets, batch.forced):
        assert set(target) == {number for name, number in stated if name == fact["needle"]} and len(target) == 3
        ends = list(zip(span[::2], span[1::2]))
        assert {Bytes().decode(batch.prompts[0][a:b]) for a, b in ends} == set(target) and ends == sorted(ends)
        assert Bytes().decode(question) == f"\n\nThe magic numbers for {fact['needle']} are"
    a, b, c = batch.targets[0]
    rows = task.score(batch, Answers([f" {c}, {a}x, 1{b}", f"{', '.join(batch.targets[1])}."]))
    assert [(row["correct"], round(row["share"], 2)) for row in rows] == [(False, 0.33), (True, 1)]
    assert round(task.summary(rows)["accuracy"], 2) == 0.67


def test_several_needles_are_asked_for_in_one_question(plain):
    batch = Needle(length=1200, needles=6, asked=3, text=plain).batch(0, 0, Bytes())
    assert len(batch.targets) == 2 and all(len(target) == 3 for target in batch.targets)
    first = Bytes().decode(batch.forced[0])
    assert re.fullmatch(r"\n\nThe magic numbers for \w+, \w+ and \w+ are", first) and batch.facts[0]["needle"].count(", ") == 2
    for name, number in zip(batch.facts[0]["needle"].split(", "), batch.targets[0]):
        assert f"for {name} is {number}. " in content(batch) and name in first


def test_every_place_of_an_answer_is_followed(tiny):
    batch = Needle(length=600, needles=2, values=2, text="licences").batch(0, 0, tiny.tokenizer)
    followed = causes.Followed(tiny.config, batch)
    tokens = [sorted(set(row[row >= 0])) for row in followed.positions]
    assert [len(row) for row in tokens] == [10, 10] and not set(tokens[0]) & set(tokens[1])
    with pytest.raises(ConfigError, match="question='are'; it names {name} once"):
        Needle(question="are")


def test_a_gate_is_shown_answers_of_several_words(plain):
    table = {"name": "needle", "length": 600, "needles": 2, "values": 2, "text": plain}
    made = record.context(record.Data(contexts=1, tasks=(table,), queries=20), Bytes(), 0)
    task = Needle(**{key: value for key, value in table.items() if key != "name"})
    for target in task.batch(0, 0, Bytes()).targets:
        assert f" are {', '.join(target)}" in Bytes().decode(made.tokens)
    with pytest.raises(ConfigError, match="Likelihood has no answers in words"):
        Likelihood().written([1])


# -------------------------------------------------------------------------------------------------- counting and pairs


@pytest.mark.parametrize("task,top", [(CommonWords(length=900, common=3, often=7), 3), (FrequentWords(length=900, words=12), 3)])
def test_the_words_asked_for_come_up_most_often(task, top):
    (target,) = (batch := task.batch(0, 3, Bytes())).targets
    often = {word: content(batch).split(", ").count(word) for word in set(re.findall(r"\w+", content(batch)))}
    least = min(often[word] for word in target)
    assert len(target) == top and all(n < least for word, n in often.items() if word not in target)
    (row,) = task.score(batch, Answers([f" {target[2]}, {target[0]}."]))
    assert not row["correct"] and row["share"] == pytest.approx(2 / 3)


def test_lists_that_cannot_be_counted_are_refused():
    with pytest.raises(ConfigError, match="holds 2 words if 2 come up 20 times each"):
        CommonWords(length=400, common=2, often=20).batch(0, 0, Bytes())
    with pytest.raises(ConfigError, match="words 3 and 4 come up equally often"):
        FrequentWords(length=400, words=30, alpha=0.2).batch(0, 0, Bytes())


def test_pairs_are_json_and_their_keys_alike():
    batch = KeyValue(length=1500, pairs=30, queries=3, alike=3).batch(0, 0, Start())
    store = json.loads(Bytes().decode(batch.prompts[0][1:]).replace(", }", "}"))
    assert len(store) == 30 and len({key[:3] for key in store}) == 1
    assert [store[fact["key"]] for fact in batch.facts] == batch.targets
    with pytest.raises(ConfigError, match="length=300 holds 14 pairs"):
        KeyValue(length=300, pairs=30).batch(0, 0, Bytes())


# -------------------------------------------------------------------------------------------------------- copied text


def test_a_gap_is_the_only_place_of_its_word_and_of_its_cue():
    batch = Cloze(length=2000, gaps=6, known=True).batch(0, 1, Bytes())
    for prompt, (first, end), target in zip(batch.prompts, batch.spans, batch.targets):
        text = Bytes().decode(prompt)
        context, _, cue = text.rpartition("\n\n")
        assert len(re.findall(r"[^\W_]+", cue)) == 6 and context.count(f"{cue} {target}") == context.count(cue) == 1
        assert len(re.findall(rf"\b{target}\b", context, re.IGNORECASE)) == 1 and Bytes().decode(prompt[first:end]) == target
    assert np.median([counts("licences")[target.lower()] for target in batch.targets]) < 40


def test_copies_are_scored_word_by_word():
    task = RepeatedCopy(length=600, words=4, times=2)
    batch = task.batch(0, 0, Bytes())
    (target,) = batch.targets
    a, b, c, d = words = target.split()[:4]
    assert target.split() == words * 2 and f" Copy this: {a} {b} {c} {d}. " in content(batch)
    answers = [f" {a}, {b} {c} {d}. {target} and on", f"{a} {b} or {d}", f"so {target}"]
    rows = [task.score(batch, Answers([answer]))[0] for answer in answers]
    assert [(row["correct"], row["share"]) for row in rows] == [(True, 1), (False, 3 / 8), (False, 1)]


def test_a_stretch_of_the_text_is_copied_from_its_first_words():
    task = RepeatedCopy(length=900, words=9, what="text", depth=0.4)
    batch = task.batch(0, 0, Bytes())
    (target,), cue = batch.targets, Bytes().decode(batch.forced[0]).strip()
    assert re.search(rf"{re.escape(cue)}\s+{re.escape(target)}", content(batch)) and content(batch).count(cue) == 1
    assert len(target.split()) == 9 and abs(batch.facts[0]["depth"] - 0.4) < 0.1
    with pytest.raises(ConfigError, match="times=2; allowed: 1 … 1"):
        RepeatedCopy(what="text", times=2)


# ---------------------------------------------------------------------------------------------------------------- code

CODE = """def long_name(first_one):
    other_name = first_one + 1
    return other_name


# long_name in a comment
class Something:
    pass


print(long_name(other_name), unknown_name)
long_name(Something)
"""


def test_references_are_to_names_that_the_file_defines():
    found = [(CODE[r.start : r.end], len(r.before)) for r in references(CODE)]
    assert found == [("first_one", 1), ("other_name", 1), ("long_name", 2), ("other_name", 2), ("Something", 1)]
    assert references("def broken(") == () and references("") == ()


@pytest.mark.parametrize("kind", [NextIdentifier, NextLine])
def test_code_goes_on_as_in_the_file(kind, texts):  # noqa: F811
    for seed in range(3):
        task = kind(length=700, contexts=1, mentions=1, text=texts["text"])
        batch = task.batch(0, seed, Bytes())
        (target,), question = batch.targets, Bytes().decode(batch.forced[0])
        code = dict(kvlab.tasks.text.documents(texts["text"]))[batch.facts[0]["document"]]
        whole = content(batch) + question
        assert whole in code
        after = code[code.index(whole) + len(whole) :]
        assert after.lstrip(" ").startswith(target)
        if kind is NextLine:
            assert after.splitlines()[0].strip() == target and not batch.spans
        else:
            assert content(batch).count(target) == 1 and target not in question and batch.facts[0]["depth"] <= 0.5


def test_lines_are_compared_without_the_spaces_around_them(texts):  # noqa: F811
    task = NextLine(length=700, text=texts["text"])
    batch = dataclasses.replace(task.batch(0, 0, Bytes()), targets=["return abc"])
    rows = [task.score(batch, Answers([answer]))[0] for answer in ("\n\n    return abc  \nmore", "return abd", "")]
    assert [(row["correct"], round(row["similarity"], 2)) for row in rows] == [(True, 1), (False, 0.9), (False, 0)]
    assert task.summary(rows)["similarity"] == pytest.approx(1.9 / 3)
    name = NextIdentifier(length=700, text=texts["text"])
    named = dataclasses.replace(batch, targets=["abc"])
    assert [name.score(named, Answers([a]))[0]["correct"] for a in (" abc(1)", "abcd", "self.abc")] == [True, False, False]


def test_text_without_such_places_is_refused(plain):
    with pytest.raises(ConfigError, match='no place that fits length=700, .*write text = "stdlib"'):
        NextIdentifier(length=700, text=plain).batch(0, 0, Bytes())


# -------------------------------------------------------------------------------------------------------- conversations

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


class Chatty(Bytes):
    """A tokenizer whose model has a template of its own."""

    render = staticmethod(chat.renderer(TEMPLATE, Bytes(), ()))


def test_facts_come_early_and_the_question_last(plain):
    task = Dialogue(length=2500, facts=3, text=plain)
    batch = task.batch(0, 0, Bytes())
    lines = content(batch).splitlines()
    assert [line.split(":")[0] for line in lines] == ["User", "Assistant"] * (len(lines) // 2) + ["User"]
    assert [line for line in lines if "Please remember" in line] == [
        f"User: Please remember that my friend in {fact['needle']} has the number {number}."
        for fact, number in zip(batch.facts, batch.targets)
    ]
    assert max(fact["depth"] for fact in batch.facts) < 0.6 and len(lines) == 2 * batch.facts[0]["turns"] + 1
    question = Bytes().decode(batch.forced[1])
    city = batch.facts[1]["needle"]
    assert question == f"Which number does my friend in {city} have?\nAssistant: Your friend in {city} has the number"


def test_a_conversation_is_in_the_words_of_the_models_template(plain):
    task = Dialogue(length=2500, facts=2, text=plain)
    batch = task.batch(0, 0, Chatty())
    assert content(batch).startswith("<user>Here is") and content(batch).endswith("</>\n<user>") and "User:" not in content(batch)
    assert (
        Bytes()
        .decode(batch.forced[0])
        .endswith("have?</>\n<assistant>\nYour friend in " + f"{batch.facts[0]['needle']} has the number")
    )
    for (first, end), number in zip(batch.spans, batch.targets):
        assert Bytes().decode(batch.prompts[0][first:end]) == number
    forced_plain = dataclasses.replace(task, plain=True)
    assert forced_plain.batch(0, 0, Chatty()).prompts == task.batch(0, 0, Bytes()).prompts


def test_a_tokenizer_brings_its_models_template(tmp_path):
    folder = Path(kvlab.__file__).parent / "models" / "tiny_recall"
    assert load(str(folder)).tokenizer.render is None
    shutil.copytree(folder, tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text(TEMPLATE)
    assert load(str(tmp_path / "chatty")).tokenizer.render([{"role": "user", "content": "k1"}]) == "<user>k1</>\n<assistant>\n"


# -------------------------------------------------------------------------------------------------- files of one's own


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_lines_with_the_same_context_share_a_batch(texts):  # noqa: F811
    task = Jsonl(path=texts["path"], length=2000)
    assert task.count() == 3
    lines = {i: [fact["line"] for fact in task.batch(i, 0, Bytes()).facts] for i in range(3)}
    assert sorted(lines.values()) == [[1, 3], [2], [4]]
    rows = task.score(task.batch(0, 0, Bytes()), Answers(["It is WET.", "it is wetter"]))
    assert [row["correct"] for row in rows] == [True, False][: len(rows)]


def test_a_long_context_is_clipped_in_the_middle_or_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", {"context": "a" * 50 + "b" * 50, "question": "?", "answers": ["x"]})
    clipped = Jsonl(path=path, length=21).batch(0, 0, Start())
    assert clipped.prompts == [[7, *b"a" * 10, *b"b" * 10]]
    with pytest.raises(ConfigError, match=r"a.jsonl, line 1: the context has 100 tokens, 20 fit; raise length=21"):
        Jsonl(path=path, length=21, too_long="refuse").batch(0, 0, Start())


@pytest.mark.parametrize(
    "line,message",
    [
        ({"context": "a", "question": "b"}, "line 3: Object missing required field `answers`"),
        ({"context": "a", "question": "b", "answers": "c"}, "line 3: Expected `array`, got `str`"),
        ({"context": "a", "question": "b", "answers": []}, "line 3: answers has nothing in it"),
        ({"context": "a", "question": "b", "answers": [" "]}, "line 3: answers has nothing in it"),
        ({"context": "", "question": "b", "answers": ["c"]}, "line 3: context has nothing in it"),
        ("{", "line 3: Input data was truncated"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    right = {"context": "a", "question": "b", "answers": ["c"], "id": 7}
    with pytest.raises(ConfigError, match=f"{message}.*; write {{"):
        Jsonl(path=write(tmp_path / "b.jsonl", right, "", line))


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Jsonl(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="is empty; give one JSON object a line"):
        Jsonl(path=write(tmp_path / "c.jsonl", ""))


# ---------------------------------------------------------------------------------------------------------- references


def test_facts_are_numbers_names_and_rare_words(plain):
    task = FactsAndFigures(text=plain)
    full = "Lamport showed in 1,978 that Line 7 is the same. A zebra said so wherever I am 3.5 m tall; Lamport."
    assert task.facts(full) == ["Lamport", "showed", "1,978", "that", "7", "zebra", "said", "3.5", "tall"]
    batch = FactsAndFigures(length=9, contexts=1, text=plain).batch(0, 0, Bytes())
    rows = task.score(batch, Answers(["Lamport 1978 zebra 3.5"]), Answers(["Lamport 1978 zebra 7"]))
    assert rows[0]["share"] == 0.75 and not rows[0]["correct"] and rows[0]["facts"] == 4
    assert task.score(batch, Answers(["x"]), Answers(["is the same"]))[0] == {
        "answer": "x",
        "target": "",
        "facts": 0,
        "correct": True,
        "share": 1.0,
    }
    with pytest.raises(ConfigError, match="compares with the full cache's answers"):
        task.score(batch, Answers(["x"]))


def test_they_run_beside_the_full_cache_and_on_ones_own_file(on_tiny, tmp_path, plain, monkeypatch):
    given, score = [], FactsAndFigures.score
    monkeypatch.setattr(FactsAndFigures, "score", lambda *args: given.append(args[2:]) or score(*args))
    own = tmp_path / "own.jsonl"
    write(own, {"context": "The sky is blue. " * 20, "question": " The", "answers": ["sky"]})
    tasks = [
        {"name": "facts_and_figures", "length": 200, "contexts": 1, "new_tokens": 12, "text": plain},
        {"name": "jsonl", "path": str(own), "length": 200, "new_tokens": 3},
        {"name": "needle", "length": 200, "contexts": 1, "needles": 2, "values": 2, "new_tokens": 1, "text": plain},
    ]
    policies = [{"label": "window", "retention": {"name": "window", "size": 20}}, {"label": "full"}]
    grid = {"task": tasks, "policy": policies}
    experiment = {"name": "three", "question": "?", "base": {"model": {"name": "tiny"}}, "grid": grid}
    kvlab.run(experiment, out=tmp_path)
    (full, reference), (_, same) = ([answers.texts for answers in each] for each in given)
    assert full == reference == same, "every policy is held against what the full cache wrote"
    rows = kvlab.results.load(tmp_path / "three").set_index(["task", "policy"]).sort_index()
    assert rows.loc[("facts_and_figures", "full"), "share"].tolist() == [1.0]
    kept = rows.loc["needle", "kept_share"]
    assert (kept["window"] < 0.5).all() and (kept["full"] == 1).all()
    env = [json.loads(path.read_text())["text"] for path in tmp_path.glob("three/*/env.json")]
    assert env.count(hashlib.sha256(own.read_bytes()).hexdigest()) == 2 and len(set(env)) == 2
    write(own, {"context": "The sky is grey. " * 20, "question": " The", "answers": ["sky"]})
    with pytest.raises(ResultsError, match="was made with other text"):
        kvlab.run(experiment, out=tmp_path)
