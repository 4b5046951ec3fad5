"""Tasks that need more of a context than one place: what is hidden in it can be read back, and answers are scored by it."""

import re
from collections import Counter

import pytest

import kvlab
from kvlab.errors import ConfigError
from kvlab.tasks import Answers, Majority, VariableTracking
from kvlab.tasks.needle import CITIES
from kvlab.tasks.text import insert
from kvlab.tasks.variable_tracking import EXAMPLES, first_number

TRACK = VariableTracking(length=900, contexts=2, chains=3, hops=2, text="stdlib")
VOTES = Majority(length=900, contexts=2, votes=11, share=0.5, colours=3, text="stdlib")


def read(batch, tiny):
    (prompt,) = batch.prompts
    return tiny.tokenizer.decode(prompt), [tiny.tokenizer.decode(f) for f in batch.forced]


@pytest.mark.parametrize("task", [TRACK, VOTES], ids=lambda t: type(t).__name__)
def test_samples_are_a_function_of_the_seed_and_have_the_length_asked_for(task, tiny):
    one, same, other = (task.batch(1, seed, tiny.tokenizer) for seed in (5, 5, 6))
    assert (one.prompts, one.forced, one.targets) == (same.prompts, same.forced, same.targets) and one.prompts != other.prompts
    assert task.batch(0, 5, tiny.tokenizer).prompts != one.prompts and len(one.prompts[0]) == task.length
    assert task.count() == 2 and one.new_tokens > max(map(len, one.forced)) and len(one.rows) == len(one.targets)


@pytest.mark.parametrize("seed", range(5))
def test_chains_lead_from_what_is_asked_to_the_target(seed, tiny):
    batch = TRACK.batch(0, seed, tiny.tokenizer)
    context, questions = read(batch, tiny)
    found = [(m[1], m[2], m.start()) for m in re.finditer(r"The magic number for (\w+) is (\w+)\. ", context)]
    says, where = {a: b for a, b, _ in found}, {a: at for a, _, at in found}
    assert len(found) == len(says) == 9
    for question, target in zip(questions, batch.targets):
        name, path = re.search(r"\nThe magic number for (\w+) is$", question)[1], []
        while not name.isdigit():
            path.append(name)
            name = says[name]
        assert name == target and len(path) == 3
        assert sorted(path, key=where.__getitem__) == path[::-1], "a reference comes after what it refers to"
        assert target not in question


def test_the_examples_are_no_part_of_any_context():
    names = [name for chain in EXAMPLES.values() for name in chain]
    assert not set(names) & set(CITIES) and len(set(names)) == 12
    first, _, _ = TRACK.examples().splitlines()
    assert re.findall(r"for (\w+) is (\w+)", first) == [("Bern", "Riga"), ("Riga", "Lyon"), ("Lyon", "55120")]


def test_answers_are_scored_by_their_first_number(tiny):
    batch = TRACK.batch(0, 0, tiny.tokenizer)
    a, b, _ = batch.targets
    rows = TRACK.score(batch, Answers([f" Lima. The magic number for Lima is {a}. So", f" {a} or {b}", ""]))
    assert [row["correct"] for row in rows] == [True, a == b, False] and TRACK.summary(rows)["samples"] == 3
    assert first_number("x12y345") == "12" and first_number("none") == "" and first_number("9") == "9"


@pytest.mark.parametrize("seed", range(5))
def test_the_target_has_most_votes(seed, tiny):
    batch = VOTES.batch(0, seed, tiny.tokenizer)
    context, questions = read(batch, tiny)
    votes = re.findall(r"The vote of (\w+) is (\w+)\. ", context)
    (winner, first), (_, second), _ = Counter(colour for _, colour in votes).most_common()
    assert (len(votes), first, second) == (11, 6, 3) and batch.targets == [winner]
    assert len({city for city, _ in votes}) == 11 and batch.facts == [{"context": 0, "last_vote": votes[-1][1]}]
    assert questions == ["\n\nThe vote of most cities is"]


def test_late_votes_mislead(tiny):
    late = Majority(length=900, votes=11, share=0.5, colours=3, late=True, text="stdlib").batch(0, 0, tiny.tokenizer)
    context, _ = read(late, tiny)
    colours = [colour for _, colour in re.findall(r"The vote of (\w+) is (\w+)\. ", context)]
    assert set(colours[:6]) == {late.targets[0]} and late.targets[0] not in colours[6:]


def test_a_vote_is_right_or_wrong(tiny):
    batch = VOTES.batch(0, 0, tiny.tokenizer)
    rows = [VOTES.score(batch, Answers([answer]))[0] for answer in (f" {batch.targets[0]}.", " grey")]
    assert [row["correct"] for row in rows] == [True, False] and VOTES.summary(rows) == {"accuracy": 0.5, "samples": 2}


@pytest.mark.parametrize("votes,colours,share", [(15, 3, 0.6), (16, 2, 0.7), (11, 4, 0.4), (65, 6, 0.3)])
def test_votes_are_counted_out(votes, colours, share):
    first, *others = Majority(length=3000, votes=votes, colours=colours, share=share).counts()
    assert (
        first + sum(others) == votes
        and first == round(votes * share)
        and max(others) - min(others) <= 1
        and len(others) == colours - 1
    )


def test_pieces_lie_where_they_are_said_to_be():
    hay = list(range(100))
    context, starts = insert(hay, [[-1, -1], [-2]])
    assert [context.index(-1), context.index(-2)] == [25, 77] and starts == [25, 77]
    assert insert(hay, [[-1], [-2]], depth=1.0)[0] == [*hay, -1, -2]


@pytest.mark.parametrize(
    "kind,options,message",
    [
        (VariableTracking, {"hops": 4}, "hops=4; allowed: 0 … 3"),
        (VariableTracking, {"chains": 40, "length": 4000}, "chains=40; allowed: 1 … 3"),
        (VariableTracking, {"length": 100}, "length=100; allowed: 180 and more"),
        (VariableTracking, {"contexts": 0}, "contexts=0; allowed: 1 and more"),
        (Majority, {"colours": 1}, "colours 2 … 6"),
        (Majority, {"votes": 1}, "votes from colours to"),
        (Majority, {"share": 0.3}, "gives 4 votes against 11"),
        (Majority, {"length": 100}, "length=100; allowed: 320 and more"),
        (Majority, {"contexts": 0}, "contexts=0; allowed: 1 and more"),
    ],
)
def test_tasks_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_they_run_in_an_experiment(on_tiny, tmp_path):
    base = {"model": {"name": "tiny"}}
    tasks = [
        {"name": "variable_tracking", "length": 600, "contexts": 1, "chains": 2, "hops": 1, "new_tokens": 3, "text": "stdlib"},
        {"name": "majority", "length": 600, "contexts": 1, "votes": 6, "colours": 2, "share": 0.7, "text": "stdlib"},
    ]
    frame = kvlab.run({"name": "two", "question": "?", "base": base, "grid": {"task": tasks}}, out=tmp_path)
    assert frame["samples"].iloc[0] == 3 and frame["accuracy"].iloc[0] == 0
    rows = kvlab.results.load(tmp_path / "two")
    assert rows["chain"].dropna().str.contains(" <- ").all() and rows["last_vote"].notna().sum() == 1
