"""What compares answers with kvpress's pipeline: a retention that compresses once, rows, totals, both sides on a small model."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import memory, parts
from kvlab.bench import beside, explain, parity, presses, reasons, rows, side
from kvlab.bench.compiled import Compilations
from kvlab.bench.pipeline import HIDE
from kvlab.core import kept
from kvlab.decode import Engine, needs
from kvlab.errors import ConfigError
from kvlab.tasks import Batch, Needle
from tests.test_peers import peers

METHODS = [m for m in beside.METHODS if parity.known(m)]


def batch(lengths, questions=((7, 8, 9), (5,)), vocab=256, new_tokens=12):
    """Random prompts, and each question of each of them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, n).tolist() for n in lengths]
    of = [row for row in range(len(prompts)) for _ in questions]
    forced = [list(q) for _ in prompts for q in questions]
    return Batch(prompts, of, forced, new_tokens, [{} for _ in of], [""] * len(of))


def stored(session, layer=0):
    """Positions that each row and head can see."""
    policy, cache = session.policies[layer], session.state.caches[layer]
    pos = np.asarray(memory.positions(policy, cache))
    return [[set(head[head >= 0].tolist()) for head in row.reshape(len(row), -1)] for row in pos]


@pytest.mark.parametrize("method", ["window", "keydiff", "tova", "adakv(expected_attention)"])
def test_of_each_prompt_its_own_share_goes_and_nothing_afterwards(tiny, method):
    engine, asked = Engine(tiny), batch([150, 150] if "adakv" in method else [150, 100])
    made = side.policy(method, 0.5, asked)
    session = engine.start(engine.prefill(asked.prompts, needs([made])), made, asked.new_tokens, asked.rows, asked.forced)
    before = stored(session)
    for prompt, heads in zip(asked.rows, before):
        number = len(heads) * kept(len(asked.prompts[prompt]), 0.5)
        assert sum(map(len, heads)) == number and ("adakv" in method or len({len(head) for head in heads}) == 1)
    session.run(asked.new_tokens)
    for prompt, old, new in zip(asked.rows, before, stored(session)):
        come = set(range(len(asked.prompts[prompt]), len(asked.prompts[prompt]) + asked.new_tokens))
        assert [head | come for head in old] == new


@pytest.mark.parametrize("method", ["tova", "expected_attention"])
def test_what_stays_is_what_the_method_itself_keeps(tiny, method):
    engine, asked = Engine(tiny), batch([128])
    made, own = side.policy(method, 0.25, asked), parts.policy({"retention": {"name": method, "ratio": 0.25, "unit": 1}})
    prompt = engine.prefill(asked.prompts, needs([made]))
    for layer in range(tiny.config.layers):
        assert stored(engine.start(prompt, made, 1), layer) == stored(engine.start(prompt, own, 0), layer)


@pytest.fixture
def ours(monkeypatch, tiny):
    monkeypatch.setattr(side.models, "load", lambda name: tiny)
    return side.Ours("tiny")


def test_with_nothing_removed_the_answers_are_the_full_caches(ours, tiny):
    asked = batch([100])
    prompt = ours.prefill(asked, ["keydiff"])
    texts, seconds = ours.answers(prompt, "keydiff", 0.0, asked, 8)
    session = ours.engine.start(prompt, parts.policy({}), asked.new_tokens, asked.rows, asked.forced)
    session.run(asked.new_tokens)
    assert texts == [tiny.tokenizer.decode(ids[:8]) for ids in session.answers()] and seconds > 0
    assert texts != ours.answers(prompt, "keydiff", 0.9, asked, 8)[0]


def test_a_chunk_answers_as_the_decode_loop_does_token_by_token(ours, tiny):
    """Questions of several lengths together, beside the method's own policy fed by the loop; also where heads share a pool."""
    for method in ("keydiff", "adakv(expected_attention)"):
        asked = batch([150, 150], ((7, 8, 9, 10), (5,)))
        prompt, made = ours.prefill(asked, [method]), side.policy(method, 0.5, asked)
        texts, _ = ours.answers(prompt, method, 0.5, asked, 8)
        fed = ours.engine.start(prompt, made, asked.new_tokens, asked.rows, asked.forced)
        seen = [np.asarray(fed.run(1, ["logits"]).logits[0]) for _ in range(asked.new_tokens)]
        assert texts == [tiny.tokenizer.decode(ids[:8]) for ids in fed.answers()]
        turns = [[*question, *range(20, 24)] for question in asked.forced]
        logits = ours.logits(prompt, method, 0.5, asked, turns)
        for row, question in enumerate(asked.forced):
            want = np.stack(seen[: len(question)])[:, row]
            np.testing.assert_allclose(logits[row, : len(question)], want, atol=1e-4)


def test_methods_go_on_in_one_program(ours):
    """Once a cache is filled nothing says by which method: a second one compiles its filling and no more."""
    asked = batch([300])
    prompt, compiled = ours.prefill(asked, ["tova", "keydiff", "key_norm"]), Compilations()
    ours.answers(prompt, "tova", 0.5, asked, 8)
    first = compiled.by_name.copy()
    ours.answers(prompt, "keydiff", 0.5, asked, 8)
    new = compiled.by_name - first
    assert {"jit(decode)", "jit(extend)", "jit(fill)"} <= set(first) and set(new) == {"jit(fill)"}


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_pools_have_one_size_whatever_the_prompt(ours, ratio):
    """Shares differ by prompt; pages that rounding spares are given away, so nothing is compiled anew."""
    method, sizes = "adakv(expected_attention)", set()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        asked = dataclasses.replace(batch([300]), prompts=[rng.integers(0, 40 * (seed + 1), 300).tolist()])
        session = ours.engine.start(ours.prefill(asked, [method]), side.policy(method, ratio, asked), asked.new_tokens)
        sizes |= {cache.pos.shape for cache in session.state.caches}
    assert len(sizes) == 1


def test_other_questions_compile_nothing(ours):
    asked = batch([100])
    prompt, compiled = ours.prefill(asked, ["tova"]), Compilations()
    ours.answers(prompt, "tova", 0.5, asked, 8)
    before = compiled.count
    again = batch([100], ((1, 2, 3, 4, 5), (6, 7)), new_tokens=13)
    ours.answers(ours.prefill(again, ["tova"]), "tova", 0.5, again, 8)
    assert before > 0 and compiled.count == before
    jax.jit(lambda x: x + 41)(jnp.ones(3))
    assert compiled.count > before


def test_of_a_known_question_the_last_token_comes_afterwards():
    whole = dataclasses.replace(batch([5, 6], ((),)), forced=[[], []])
    apart = beside.last_apart(whole)
    assert [p + f for p, f in zip(apart.prompts, apart.forced)] == list(whole.prompts)
    assert all(len(f) == 1 for f in apart.forced) and apart.new_tokens == whole.new_tokens + 1


def found(ours=(1, 0, 1, 0) * 3, theirs=(1, 0, 1, 0) * 3, nll=1e-6, right=0.0):
    made = rows.Found("tova", 0.5, "unknown", [0, 1, 2, 3] * 3)
    made.texts = {"kvlab": list(map(str, ours)), "kvpress": list(map(str, theirs))}
    made.hits = {"kvlab": list(ours), "kvpress": list(theirs)}
    made.seconds = {"kvlab": [1.0, 2.0, 9.0, 2.0], "kvpress": [8.0, 8.0, 8.0, 9.0]}
    for document in (0, 1):
        made.text.add(np.array([2.0 + nll, 3.0 + nll]), np.array([2.0, 3.0]), document)
        made.right.add(np.array([1.0, 1.5]), np.array([1.0, 1.5 + right]), document)
    return made


def test_a_row_agrees_unless_an_interval_or_the_likelihood_says_otherwise():
    row = rows.row(found())
    assert row["agree"] and row["same_answers"] == row["of"] == 12 and row["hits_kvlab"] == row["hits_kvpress"] == 6
    assert row["low"] < 0 < row["high"] and row["nll_difference"] == pytest.approx(1e-6)
    assert row["answer_nll_kvlab"] == row["answer_nll_kvpress"] == 1.25 and row["answer_nll_low"] == 0
    assert not rows.row(found(nll=1e-3))["agree"]  # the same in every document, so the interval has no width
    assert not rows.row(found(right=1e-3))["agree"] and rows.row(found(right=1e-3))["answer_nll_high"] < 0
    alone = found(right=1e-3)
    alone.right.cluster = [0] * 4
    assert not rows.row(alone)["agree"] and "answer_nll_low" not in rows.row(alone)  # one context has no interval
    json.dumps(rows.row(alone), allow_nan=False)
    worse = rows.row(found((0,) * 12, (1,) * 12))
    assert not worse["agree"] and worse["high"] < 0 and worse["same_answers"] == 0
    assert found((1, 0, 0, 0) * 3).differs() == 2 and found().differs() is None


def test_totals_are_medians_and_count_a_shared_prefill_once():
    total = rows.totals([found(), found()], [5.0, 5.0, 50.0, 5.0])
    assert total["prefill_seconds_kvlab"] == 20 and total["seconds_kvlab"] == 20 + 2 * 8 and total["seconds_kvpress"] == 2 * 32
    assert total["time_ratio"] == pytest.approx(36 / 64)


def test_the_table_has_a_line_for_each_row():
    row = rows.row(found())
    bare = {key: value for key, value in row.items() if not key.startswith("nll")}
    lines = rows.as_markdown([row, {**bare, "question": "known", "agree": False, "explained": "ties"}]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| tova | 0.5 | 6, 6 of 12 | 12 | +0.000 [") and lines[2].endswith("| yes |  |")
    assert lines[3].startswith("| tova, question known |") and lines[3].endswith("| no | ties |")


def test_a_method_that_is_not_compared_is_an_error():
    with pytest.raises(ConfigError, match="random"):
        beside.check(["random"])
    beside.check(list(beside.METHODS))


def test_a_constant_channel_explains_what_it_spoils_only():
    """300 tokens: two whole partitions of 128 after 4 sinks; the second's values decide how the first is ranked."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 1, 1, 300, 4))
    case = lambda value: types.SimpleNamespace(theirs=types.SimpleNamespace(layers=[(None, None, key, value, None, None)]))
    flat = value.copy()
    flat[..., 132:260, 1] = 0.5
    scores = rng.permutation(300)[None, None] / 300
    theirs = reasons.top(scores, 150)
    swapped = lambda a, b: np.where(np.isin(np.arange(300), [a, b]), ~theirs, theirs)
    inside = swapped(*(np.flatnonzero(theirs[0, 0, 4:132] == on)[0] + 4 for on in (True, False)))
    outside = swapped(*(np.flatnonzero(theirs[0, 0, 140:] == on)[-1] + 140 for on in (True, False)))
    reason = lambda value, ours: reasons.constant(reasons.Pair(case(value), 0.5, ours, theirs, scores))
    assert "divides by 0 in 1 of 1 heads" in reason(flat, inside)
    assert not reason(value, inside) and not reason(flat, outside)


# ---------------------------------------------------------------------------------------------------------- both sides


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A random Llama on both sides."""
    from kvlab.bench.pipeline import Pipeline

    folder = tmp_path_factory.mktemp("beside")
    presses.tiny("Llama", folder)
    mine = side.Ours(str(folder))
    return mine, Pipeline(mine.engine.model)


def test_a_likelihood_is_that_of_its_targets():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32)) + 3
    np.testing.assert_allclose(rows.nll(logits, [1, 2]), -np.log([0.25, 0.7]), atol=1e-6)


def test_a_right_answer_is_fed_after_its_question_but_for_its_last_token(tiny):
    asked = dataclasses.replace(batch([5]), targets=["12", "345"])
    right, turns = beside.right_answers(asked, tiny.tokenizer)
    assert [tiny.tokenizer.decode(ids) for ids in right] == [" 12", " 345"]
    assert turns == [[7, 8, 9, *right[0][:-1]], [5, *right[1][:-1]]]


@pytest.mark.parametrize(("piece", "single", "explains"), [(1e-2, 1e-6, True), (1e-2, 1e-2, False), (1e-6, 1e-6, False)])
def test_what_shows_through_explains_what_one_token_at_a_time_mends(ours, piece, single, explains):
    """kvpress's side is kvlab's own logits, with so much of an error where several tokens are fed at once, or one."""
    method, asked = "adakv(expected_attention)", batch([150], ((7, 8, 9),))
    exact = ours.logits(ours.prefill(asked, [method]), method, 0.5, asked, asked.forced)[0]
    wrong = np.where(np.arange(exact.shape[-1]) == 8, 1.0, 0.0)
    fed = lambda cache, turn, start, step: exact + wrong * (single if step == 1 else piece)
    theirs = types.SimpleNamespace(passed=lambda ids: None, compressed=lambda *args: None, fed=fed)
    one = rows.Found(method, 0.5, "unknown", prompt=asked.prompts, turn=asked.forced)
    assert bool(explain.shows_through(ours, theirs, one, 0)) == explains


@peers
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("kvzip", "lagkv", "key_norm")])  # which tie, or differ
def test_answers_as_kvpress_does(both, method):
    """The same text to each question, asked of two prompts of their own lengths; another ratio is told from it."""
    mine, theirs = both
    asked = batch([300, 300] if "adakv" in method else [300, 280])
    prompt = mine.prefill(asked, [method])
    answers = {ratio: mine.answers(prompt, method, ratio, asked, 8)[0] for ratio in (0.5, 0.9)}
    assert answers[0.5] == theirs.answers(method, 0.5, asked, 8).texts != answers[0.9]


@peers
@pytest.mark.parametrize("method", ["window", "adakv(expected_attention)"])
def test_predicts_as_kvpress_does(both, method):
    """Token by token and, where nothing is hidden behind a false key, in one piece."""
    mine, theirs = both
    asked, more = batch([300]), [*range(12)]
    ours = mine.logits(mine.prefill(asked, [method]), method, 0.5, asked, [more, more])
    cache = theirs.compressed(theirs.passed(asked.prompts[0]), method, 0.5)
    for step in (1, None)[: 1 + (method not in HIDE)]:
        np.testing.assert_allclose(ours[0], theirs.fed(cache, more, 300, step), atol=1e-4)


@peers
@pytest.mark.parametrize("method", METHODS)
def test_presses_that_share_a_pass_leave_what_the_pipeline_leaves(both, method):
    """One after another from the same pass, those that hide tokens first: what follows is what follows in the pipeline."""
    _, theirs = both
    asked = batch([300], ((7, 8, 9),))
    at = theirs.passed(asked.prompts[0])
    for first in HIDE:
        theirs.compressed(at, first, 0.9)
    shared = theirs.fed(theirs.compressed(at, method, 0.5), [7, 8, 9, 3], 300)
    own = theirs.answers(method, 0.5, asked, 2, [[7, 8, 9, 3]]).logits[0]
    np.testing.assert_allclose(shared, own, atol=1e-5)


@peers
def test_a_replay_is_masked_while_it_answers_and_no_longer(both):
    _, theirs = both
    asked = batch([300])
    plain = theirs.answers("window", 0.0, asked, 8).texts
    assert theirs.answers("kvzip", 0.9, asked, 8).texts != plain == theirs.answers("window", 0.0, asked, 8).texts


@peers
def test_a_whole_run_on_a_small_model(both, tmp_path):
    """Rows with and without the question, and no compilation once all is warm."""
    task = Needle(length=600, contexts=2, needles=2)
    name, table = both[0].engine.model.name, tmp_path / "table.md"
    made = beside.main(name, ["tova", "keydiff"], [0.5], task, 2, 1, 1, table)
    asked = [(row["method"], row["question"], row["of"]) for row in made["rows"]]
    assert asked == [("tova", "unknown", 4), ("keydiff", "unknown", 4), ("tova", "known", 2)]
    assert made["traces"] == sum(made["traces_by_program"].values()) > 0 == made["traces_warm"]
    assert made["traces_by_program"]["jit(decode)"] == made["traces_by_program"]["jit(extend)"] == 1
    assert all(row["agree"] and row["same_answers"] == row["of"] and not row["explained"] for row in made["rows"])
    assert all(abs(row["answer_nll_difference"]) < rows.ROUNDING for row in made["rows"])
    assert "nll_kvlab" in made["rows"][0] and "nll_kvlab" not in made["rows"][2]
    assert table.read_text() == rows.as_markdown(made["rows"]) and made["known"]["seconds_kvpress"] > 0
    assert 0 < made["time_ratio"] < made["time_ratio_cold"]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A random Gemma on both sides after 300 tokens: one local layer and two others."""
    folder = tmp_path_factory.mktemp("local")
    presses.tiny("Gemma3", folder)
    ids = lambda model: np.random.default_rng(0).integers(0, 256, 300).tolist()
    return parity.prepare("tiny-gemma3", str(folder), ids, list(parity.METHODS), folder / "filters.safetensors")


@peers
@pytest.mark.parametrize("method", [m for m in parity.METHODS if m != "kvzip"])
def test_beside_local_layers_the_others_keep_what_kvpress_keeps(local, method):
    assert len(local.ours.records) == len(local.theirs.layers) == 2 and not parity.fits("kvzip", local.model.config)
    for ratio in parity.RATIOS:
        row = parity.compare(method, ratio, local)
        assert row["agree"] or row["reason"], row
