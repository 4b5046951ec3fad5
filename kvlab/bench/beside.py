"""Answers, likelihood and time beside kvpress's own pipeline, on the same prompts and weights (extra "peers").

Both compress a context once and ask questions about it at positions that go on after the context; both feed a question as one
chunk, keep all that comes afterwards (kvlab by `kvlab.bench.once`, since its retentions go on evicting otherwise) and answer
greedily. Token ids are the same. kvpress runs a prefill for each method and its questions in turn; kvlab shares one prefill among
the methods, fills a cache once for each, and asks all questions of a context together, on copies of it.

Likelihoods are those of the right answers, after the same contexts and questions, and of documents that are read on. For the
latter kvpress's presses share one pass of a document, which none of them changes.

kvpress's adakv and kvzip store all tokens and hide those that they drop behind a false key, one for all queries of a piece: the
longer a question, the nearer it is to some of them, and then what is hidden shows through a little.

Where the question is known it is part of what is compressed, all but its last token, which then goes through the cache. A method
that replays the prompt (kvzip) is timed apart. Left out is `random`: the two draw other numbers, so nothing pairs their answers,
and kvpress's drops the first tokens, without which a model cannot read on. The first context goes through kvlab before anything
is compiled: that pass, and the warm one over the other contexts, are the cold figure. kvpress's runs are interleaved with kvlab's
warm ones, method by method.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlab import compilation
from kvlab.bench import explain, rows
from kvlab.bench.compiled import Compilations, compiled_anew
from kvlab.bench.pipeline import HIDE, PIECE, Pipeline
from kvlab.bench.rows import Found
from kvlab.bench.side import REPLAYS, Ours
from kvlab.errors import ConfigError, nearest
from kvlab.experiment.report import progress
from kvlab.experiment.store import write_text
from kvlab.tasks import Answers, Batch, Likelihood, Needle

METHODS = ("window", "tova", "expected_attention", "keydiff", "key_norm", "lagkv", "snapkv", "adakv(expected_attention)", "kvzip")
KNOWN = ("tova", "snapkv")
SEED = 0
CONTINUATION = 48  # tokens of a document that are read on

Tick = Callable[[], Any]


def last_apart(batch: Batch) -> Batch:
    """A batch whose questions are part of the prompts, with the last token of each fed afterwards."""
    prompts, last = [ids[:-1] for ids in batch.prompts], [ids[-1:] for ids in batch.prompts]
    return dataclasses.replace(batch, prompts=prompts, forced=last, new_tokens=batch.new_tokens + 1)


def batches(task: Needle, tokenizer) -> Iterator[Batch]:
    for index in range(task.count()):
        batch = task.batch(index, SEED, tokenizer)
        yield last_apart(batch) if task.known else batch


def right_answers(batch: Batch, tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each sample's right answer, and what is fed to predict them: the question and all of them but the last."""
    right = [tokenizer.encode(f" {target}") for target in batch.targets]
    return right, [[*question, *answer[:-1]] for question, answer in zip(batch.forced, right)]


def ask(ours: Ours, theirs: Pipeline, task: Needle, found: list[Found], pairs: int, tick: Tick) -> tuple[list[float], int]:
    """Puts a task's questions to both sides; seconds of kvlab's prefill of each context, replays not in it, and compilations."""
    prefill, compiled, anew = [], Compilations(), 0
    tokenizer = ours.engine.model.tokenizer
    for context, batch in enumerate(batches(task, tokenizer)):
        before = compiled.count
        prompt = ours.prefill(batch, [each.method for each in found])
        anew += compiled.count - before
        prefill.append(prompt.seconds)
        right, turns = right_answers(batch, tokenizer)
        for each in found:
            args = each.method, each.ratio, batch, task.new_tokens
            for _ in range(pairs):
                made, before = theirs.answers(*args, turns), compiled.count
                texts, seconds = ours.answers(prompt, *args)
                anew += compiled.count - before
                each.seconds["kvpress"].append(made.seconds)
                each.seconds["kvlab"].append(seconds)
                tick()
            for side, answers in (("kvlab", texts), ("kvpress", made.texts)):
                each.texts[side] += answers
                each.hits[side] += [score["correct"] for score in task.score(batch, Answers(answers))]
            predicted = ours.logits(prompt, each.method, each.ratio, batch, turns)
            for mine, other, turn, answer in zip(predicted, made.logits, turns, right):
                last = slice(len(turn) - len(answer), len(turn))
                each.right.add(rows.nll(mine[last], answer), rows.nll(other[last], answer), context)
            each.context += [context] * len(batch.rows)
            each.prompt += [batch.prompts[row] for row in batch.rows]
            each.turn += turns
            _tell(each)
        compilation.relieve()
    return prefill, anew


def ask_alone(ours: Ours, task: Needle, found: Sequence[Found], tick: Tick) -> float:
    """Seconds that kvlab takes for the first context's questions before anything is compiled, without methods that replay."""
    batch = next(batches(task, ours.engine.model.tokenizer))
    prompt = ours.prefill(batch, [each.method for each in found])
    seconds = prompt.seconds
    for each in found:
        took = ours.answers(prompt, each.method, each.ratio, batch, task.new_tokens)[1]
        seconds += 0.0 if each.method in REPLAYS else took
        tick()
    return seconds


def read_on(ours: Ours, theirs: Pipeline, task: Likelihood, found: list[Found], tick: Tick) -> None:
    """Feeds documents' continuations to both sides, each as one chunk."""
    batch = task.batch(0, SEED, ours.engine.model.tokenizer)
    for i, (ids, more) in enumerate(zip(batch.prompts, batch.forced)):
        one = dataclasses.replace(batch, prompts=[ids], rows=[0], forced=[more])
        prompt, at = ours.prefill(one, [each.method for each in found]), theirs.passed(ids)
        for each in found:
            mine = ours.logits(prompt, each.method, each.ratio, one, [more])[0]
            cache = theirs.compressed(at, each.method, each.ratio)
            other = theirs.fed(cache, more, len(ids), PIECE if each.method in HIDE else None)
            each.text.add(rows.nll(mine[:-1], more[1:]), rows.nll(other[:-1], more[1:]), i)
            tick()
        compilation.relieve()


def _tell(each: Found) -> None:
    hits = ", ".join(f"{side} {sum(each.hits[side])} hits in {sum(each.seconds[side]):.1f} s" for side in rows.SIDES)
    print(f"{each.method:26} {each.question:8} {each.ratio:.2f}  {hits} of {len(each.context)}", flush=True)


def check(methods: list[str]) -> None:
    """Errors: ConfigError for a method that is not compared."""
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"method {method!r} is not compared with kvpress's pipeline; {nearest(method, METHODS)}")


def measure(ours: Ours, theirs: Pipeline, task: Needle, found: list[Found], pairs: int, tick: Tick) -> dict[str, Any]:
    """Asks what no method knows, cold and then warm: seconds, their ratios to kvpress's, and what was compiled in both passes."""
    compiled = Compilations()
    first, traces = ask_alone(ours, task, found, tick), dict(compiled.by_name)
    prefill, anew = ask(ours, theirs, task, found, pairs, tick)
    replays = [each for each in found if each.method in REPLAYS]
    figures: dict[str, Any] = rows.totals([each for each in found if each not in replays], prefill)
    cold = first + figures["seconds_kvlab"] * (len(prefill) - 1) / len(prefill)
    figures |= {"cold_seconds_kvlab": cold, "time_ratio_cold": cold / figures["seconds_kvpress"]}
    figures |= {"traces": sum(traces.values()), "traces_warm": anew, "traces_by_program": traces}
    apart = {side: sum(rows.total(each.seconds[side], len(prefill)) for each in replays) for side in rows.SIDES}
    return figures | {f"replays_seconds_{side}": seconds for side, seconds in apart.items()}


def main(
    model: str, methods: list[str], ratios: list[float], task: Needle, documents: int, known: int, pairs: int, table: Path | None
) -> dict[str, Any]:
    """Rows by method and ratio, those whose questions were known last; totals in seconds."""
    check(methods)
    chosen = [method for method in METHODS if method in (methods or METHODS)]
    make = lambda names, question: [Found(m, ratio, question) for ratio in ratios for m in names if m in chosen]
    unseen, seen = make(METHODS, "unknown"), make(KNOWN if known else (), "known")
    units = len(unseen) * (1 + task.contexts * pairs + documents) + len(seen) * known * pairs
    with compiled_anew(), progress() as bar:
        ours = Ours(model)
        theirs = Pipeline(ours.engine.model)
        count = bar.add_task("beside kvpress", total=units)
        tick = lambda: bar.advance(count)
        figures = {"model": model, **dataclasses.asdict(task), **measure(ours, theirs, task, unseen, pairs, tick)}
        if documents:
            read_on(ours, theirs, Likelihood(length=task.length, contexts=documents, continuation=CONTINUATION), unseen, tick)
        if seen:
            ready = dataclasses.replace(task, known=True, contexts=known)
            prefill, anew = ask(ours, theirs, ready, seen, pairs, tick)
            figures["known"] = {**rows.totals(seen, prefill), "traces": anew}  # compiling is in these seconds
        made = [rows.row(each) for each in (*unseen, *seen)]
        with explain.reasons(ours, theirs, chosen) as why:
            made = [{**row, "explained": why(each, row["agree"])} for each, row in zip((*unseen, *seen), made)]
    _conclude(figures, made)
    if table is not None:
        write_text(table, rows.as_markdown(made))
    return {**figures, "rows": made}


def _conclude(figures: dict[str, Any], made: list[dict[str, Any]]) -> None:
    agree, open_ = sum(row["agree"] for row in made), sum(not (row["agree"] or row["explained"]) for row in made)
    seconds = " s of ".join(f"{figures[f'seconds_{side}']:.1f}" for side in rows.SIDES)
    print(
        f"kvlab takes {figures['time_ratio']:.3f} of kvpress's time warm ({seconds} s), {figures['time_ratio_cold']:.3f} cold, "
        f"{figures['traces']} programs compiled; {agree} of {len(made)} rows agree, {open_} differ unexplained"
    )
