"""Answers, likelihood and time beside kvpress's own pipeline, on the same prompts and weights (extra "peers").

Both compress a context once and ask questions about it one by one, at positions that go on after the context; both keep all that
comes afterwards (kvlab by `kvlab.bench.once`, since its retentions go on evicting otherwise); both answer greedily. Token ids are
the same. kvpress runs a prefill for each method and its questions in turn; kvlab shares one prefill among the methods and decodes
a context's questions together, through `Engine.prefill` and `Engine.start` as `kvlab run` does, a step a call.

kvpress's adakv and kvzip store all tokens and hide those that they drop behind a false key, one for all queries of a piece: the
longer a question, the nearer it is to some of them, and then what is hidden shows through a little.

Where the question is known it is part of what is compressed, all but its last token, which then goes through the cache. A method
that replays the prompt (kvzip) is timed apart. Left out is `random`: the two draw other numbers, so nothing pairs their answers,
and kvpress's drops the first tokens, without which a model cannot read on. The second pass through kvlab, after all is compiled,
is the warm one; kvpress's runs are interleaved with it, method by method.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab import compilation
from kvlab.bench import parity, rows
from kvlab.bench.compiled import Compilations, compiled_anew
from kvlab.bench.pipeline import Pipeline
from kvlab.bench.rows import Found
from kvlab.bench.side import REPLAYS, Ours
from kvlab.errors import ConfigError, nearest
from kvlab.evaluate import logits as statistics
from kvlab.experiment.store import write_text
from kvlab.tasks import Answers, Batch, Likelihood, Needle

METHODS = ("window", "tova", "expected_attention", "keydiff", "key_norm", "lagkv", "snapkv", "adakv(expected_attention)", "kvzip")
KNOWN = ("tova", "snapkv")
SEED = 0


def last_apart(batch: Batch) -> Batch:
    """A batch whose questions are part of the prompts, with the last token of each fed afterwards."""
    prompts, last = [ids[:-1] for ids in batch.prompts], [ids[-1:] for ids in batch.prompts]
    return dataclasses.replace(batch, prompts=prompts, forced=last, new_tokens=batch.new_tokens + 1)


def batches(task: Needle, tokenizer) -> Iterator[Batch]:
    for index in range(task.count()):
        batch = task.batch(index, SEED, tokenizer)
        yield last_apart(batch) if task.known else batch


def ask(ours: Ours, theirs: Pipeline, task: Needle, found: list[Found], pairs: int = 1) -> list[float]:
    """Puts a task's questions to both sides; seconds of kvlab's prefill of each context, replays not in it."""
    prefill = []
    for context, batch in enumerate(batches(task, ours.engine.model.tokenizer)):
        prompt = ours.prefill(batch, [each.method for each in found])
        prefill.append(prompt.seconds)
        for each in found:
            args = each.method, each.ratio, batch, task.new_tokens
            for _ in range(pairs):
                done = {"kvpress": theirs.answers(*args), "kvlab": ours.answers(prompt, *args)}
                for side, (_, seconds) in done.items():
                    each.seconds[side].append(seconds)
            for side, (texts, _) in done.items():
                each.texts[side] += texts
                each.hits[side] += [score["correct"] for score in task.score(batch, Answers(texts))]
            each.context += [context] * len(batch.rows)
            each.prompt += [batch.prompts[row] for row in batch.rows]
            _tell(each)
        compilation.relieve()
    return prefill


def ask_alone(ours: Ours, task: Needle, found: list[Found]) -> float:
    """Seconds that kvlab takes for a task's questions before anything is compiled, without the methods that replay."""
    seconds = 0.0
    for batch in batches(task, ours.engine.model.tokenizer):
        prompt = ours.prefill(batch, [each.method for each in found])
        seconds += prompt.seconds
        for each in found:
            took = ours.answers(prompt, each.method, each.ratio, batch, task.new_tokens)[1]
            seconds += 0.0 if each.method in REPLAYS else took
        compilation.relieve()
    return seconds


def read_on(ours: Ours, theirs: Pipeline, task: Likelihood, found: list[Found]) -> None:
    """Feeds documents' continuations to both sides."""
    batch = task.batch(0, SEED, ours.engine.model.tokenizer)
    prompt = ours.prefill(batch, [each.method for each in found])
    for each in found:
        mine = ours.logits(prompt, each.method, each.ratio, batch)
        other = theirs.logits(each.method, each.ratio, batch)
        for i, target in enumerate(batch.targets):
            tokens = statistics.compare(mine[:-1, i], other[:-1, i], target[1:])
            each.nll["kvlab"] += tokens["nll"].tolist()
            each.nll["kvpress"] += tokens["nll_reference"].tolist()
            each.document += [i] * len(tokens["nll"])
        compilation.relieve()


def _tell(each: Found) -> None:
    hits = ", ".join(f"{side} {sum(each.hits[side])} hits in {sum(each.seconds[side]):.1f} s" for side in rows.SIDES)
    print(f"{each.method:26} {each.question:8} {each.ratio:.2f}  {hits} of {len(each.context)}", flush=True)


def why(model: str, found: Found, agree: bool) -> str:
    """How what the two keep of a prompt differs, one whose answers do if there is one; "" where nothing explains that."""
    if found.method not in parity.METHODS or (agree and found.differs() is None):
        return ""
    ids = found.prompt[found.differs() or 0]
    with tempfile.TemporaryDirectory() as scratch:
        case = parity.prepare(model, model, lambda _: ids, [found.method], Path(scratch) / "filters.safetensors")
        kept = parity.compare(found.method, found.ratio, case)
    return "the same tokens stay" if kept["agree"] and agree else kept["reason"]


def check(methods: list[str]) -> None:
    """Errors: ConfigError for a method that is not compared."""
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"method {method!r} is not compared with kvpress's pipeline; {nearest(method, METHODS)}")


def measure(ours: Ours, theirs: Pipeline, task: Needle, found: list[Found], pairs: int) -> dict[str, Any]:
    """Asks what no method knows, cold and then warm; seconds and compilations of both passes."""
    compiled = Compilations()
    figures: dict[str, Any] = {"cold_seconds_kvlab": ask_alone(ours, task, found), "compilations": compiled.count}
    before = compiled.count
    prefill = ask(ours, theirs, task, found, pairs)
    figures["compilations_warm"] = compiled.count - before
    return {**figures, **rows.totals([each for each in found if each.method not in REPLAYS], prefill)}


def main(
    model: str, methods: list[str], ratios: list[float], task: Needle, documents: int, known: bool, pairs: int, table: Path | None
) -> dict[str, Any]:
    """Rows by method and ratio, those whose questions were known last, and totals in seconds."""
    check(methods)
    chosen = [method for method in METHODS if method in (methods or METHODS)]
    make = lambda names, question: [Found(m, ratio, question) for ratio in ratios for m in names if m in chosen]
    unseen, seen = make(METHODS, "unknown"), make(KNOWN if known else (), "known")
    with compiled_anew():
        ours = Ours(model)
        theirs = Pipeline(ours.engine.model)
        figures = {"model": model, **dataclasses.asdict(task), "unknown": measure(ours, theirs, task, unseen, pairs)}
        if documents:
            read_on(ours, theirs, Likelihood(length=task.length, contexts=documents, continuation=48), unseen)
        if seen:
            figures["known"] = rows.totals(seen, ask(ours, theirs, dataclasses.replace(task, known=True), seen, pairs))
        made = [rows.row(each) for each in (*unseen, *seen)]
        made = [{**row, "reason": why(model, each, row["agree"])} for each, row in zip((*unseen, *seen), made)]
    print({name: round(value, 3) for name, value in figures["unknown"].items()})
    if table is not None:
        write_text(table, rows.as_markdown(made))
    return {**figures, "rows": made}
