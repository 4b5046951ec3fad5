"""Answers, likelihood and time beside kvpress's own pipeline, on the same prompts and weights (extra "peers").

Both compress a context once and ask questions about it one by one, at positions that go on after the context; both keep all that
comes afterwards (kvlab by `kvlab.bench.once`, since its retentions go on evicting otherwise); both answer greedily. Token ids are
the same. kvpress runs a prefill for each method and its questions in turn; kvlab shares one prefill among the methods and decodes
a context's questions together, through `Engine.prefill` and `Engine.start` as `kvlab run` does, a step a call.

Where the question is known it is part of what is compressed, all but its last token, which then goes through the cache. A method
that replays the prompt (kvzip) is timed apart. Left out is `random`: the two draw other numbers, so nothing pairs their answers,
and kvpress's drops the first tokens, without which a model cannot read on. The second pass through kvlab, after all is compiled,
is the warm one; kvpress's runs are interleaved with it, method by method.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvlab import compilation, models, parts
from kvlab.bench import parity, rows
from kvlab.bench.pipeline import Pipeline
from kvlab.bench.rows import Found
from kvlab.core import PAGE
from kvlab.decode import Engine, Prefilled, needs
from kvlab.errors import ConfigError, nearest
from kvlab.evaluate import logits as statistics
from kvlab.experiment.store import write_text
from kvlab.policy import Policy
from kvlab.session import Session
from kvlab.tasks import Batch, Likelihood, Needle

METHODS = ("window", "tova", "expected_attention", "keydiff", "key_norm", "lagkv", "snapkv", "adakv(expected_attention)", "kvzip")
KNOWN = ("tova", "snapkv")
REPLAYS = ("kvzip",)
SEED = 0


def policy(method: str, ratio: float, batch: Batch) -> Policy:
    """A method that compresses the prompts of a batch and keeps what comes afterwards, token by token."""
    longest = max(map(len, batch.prompts))
    inner = {"name": "window", "sinks": 4} if method == "window" else parity.retention(method, ratio, longest, "")
    room = -(-batch.new_tokens // PAGE) * PAGE  # in pages, so that batches with other questions share their programs
    once = {"name": "kvlab.bench.once:Once", "inner": inner, "ratio": ratio, "room": room, "length": longest}
    return parts.policy({"retention": once})


class Ours:
    """kvlab's side, timed."""

    def __init__(self, name: str):
        self.engine = Engine(models.load(name))

    def prefill(self, batch: Batch, methods: list[str]) -> Prefilled:
        return self.engine.prefill(batch.prompts, needs([policy(method, 0.5, batch) for method in methods]))

    def answers(self, prompt: Prefilled, method: str, ratio: float, batch: Batch, new_tokens: int) -> tuple[list[str], float]:
        """The greedy answer of each sample, and seconds; of the prefill only a replay, for the method that needs it."""
        begin = time.perf_counter()
        session = self._start(prompt, method, ratio, batch)
        for _ in range(max(map(len, batch.forced)) - 1 + new_tokens):
            session.run(1)
        seconds = time.perf_counter() - begin + (prompt.replay_seconds if method in REPLAYS else 0.0)
        return [self.engine.model.tokenizer.decode(ids[:new_tokens]) for ids in session.answers()], seconds

    def logits(self, prompt: Prefilled, method: str, ratio: float, batch: Batch) -> tuple[np.ndarray, float]:
        """Logits `[steps, B, V]` of what follows each prompt, and seconds without the prefill."""
        begin = time.perf_counter()
        session = self._start(prompt, method, ratio, batch)
        steps = [np.asarray(session.run(1, ("logits",)).logits[0]) for _ in range(batch.new_tokens)]
        return np.stack(steps), time.perf_counter() - begin

    def _start(self, prompt: Prefilled, method: str, ratio: float, batch: Batch) -> Session:
        made = policy(method, ratio, batch)
        return self.engine.start(prompt, made, batch.new_tokens, batch.rows, batch.forced, self.engine.model.stops)


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
                each.hits[side] += [score["correct"] for score in task.score(batch, texts, None, None)]
            each.context += [context] * len(batch.rows)
            _tell(each)
        compilation.relieve()
    return prefill


def ask_alone(ours: Ours, task: Needle, found: list[Found]) -> float:
    """Seconds that kvlab takes for a task's questions, all of it, for the first time or again."""
    begin = time.perf_counter()
    for batch in batches(task, ours.engine.model.tokenizer):
        prompt = ours.prefill(batch, [each.method for each in found])
        for each in found:
            ours.answers(prompt, each.method, each.ratio, batch, task.new_tokens)
    return time.perf_counter() - begin


def read_on(ours: Ours, theirs: Pipeline, task: Likelihood, found: list[Found]) -> None:
    """Feeds documents' continuations to both sides, token by token here, in one piece there."""
    batch = task.batch(0, SEED, ours.engine.model.tokenizer)
    prompt = ours.prefill(batch, [each.method for each in found])
    for each in found:
        other, seconds = theirs.logits(each.method, each.ratio, batch)
        each.nll_seconds["kvpress"].append(seconds)
        mine, seconds = ours.logits(prompt, each.method, each.ratio, batch)
        each.nll_seconds["kvlab"].append(seconds)
        for i, target in enumerate(batch.targets):
            tokens = statistics.compare(mine[:-1, i], other[:-1, i], target[1:])
            each.nll["kvlab"] += tokens["nll"].tolist()
            each.nll["kvpress"] += tokens["nll_reference"].tolist()
            each.document += [i] * len(tokens["nll"])
        compilation.relieve()


def _tell(each: Found) -> None:
    hits = ", ".join(f"{side} {sum(each.hits[side])} hits in {sum(each.seconds[side]):.1f} s" for side in rows.SIDES)
    print(f"{each.method:26} {each.question:8} {each.ratio:.2f}  {hits} of {len(each.context)}", flush=True)


class Compilations:
    """Counts XLA's compilations from now on."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._see)

    def _see(self, event: str, duration_secs: float, **more: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def check(methods: list[str]) -> None:
    """Errors: ConfigError for a method that is not compared."""
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"method {method!r} is not compared with kvpress's pipeline; {nearest(method, METHODS)}")


def measure(ours: Ours, theirs: Pipeline, task: Needle, found: list[Found], pairs: int) -> dict[str, Any]:
    """Asks what no method knows, cold and then warm; seconds and compilations of both passes."""
    compiled = Compilations()
    quick = [each for each in found if each.method not in REPLAYS]
    figures: dict[str, Any] = {"cold_seconds_kvlab": ask_alone(ours, task, quick), "compilations": compiled.count}
    ask_alone(ours, dataclasses.replace(task, contexts=1), [each for each in found if each not in quick])
    before = compiled.count
    prefill = ask(ours, theirs, task, found, pairs)
    return {**figures, "compilations_warm": compiled.count - before, **rows.totals(quick, prefill)}


def main(
    model: str, methods: list[str], ratios: list[float], task: Needle, documents: int, known: bool, pairs: int, table: Path | None
) -> dict[str, Any]:
    """Rows by method and ratio, those whose questions were known last, and totals in seconds."""
    check(methods)
    chosen = [method for method in METHODS if method in (methods or METHODS)]
    make = lambda names, question: [Found(m, ratio, question) for ratio in ratios for m in names if m in chosen]
    unseen, seen = make(METHODS, "unknown"), make(KNOWN if known else (), "known")
    with tempfile.TemporaryDirectory() as scratch:
        jax.config.update("jax_compilation_cache_dir", scratch)  # nothing that was compiled before, so that cold is cold
        ours = Ours(model)
        theirs = Pipeline(ours.engine.model)
        figures = {"model": model, **dataclasses.asdict(task), "unknown": measure(ours, theirs, task, unseen, pairs)}
        if documents:
            read_on(ours, theirs, Likelihood(length=task.length, contexts=documents, continuation=48), unseen)
        if seen:
            figures["known"] = rows.totals(seen, ask(ours, theirs, dataclasses.replace(task, known=True), seen, pairs))
    made = [rows.row(each) for each in (*unseen, *seen)]
    if table is not None:
        write_text(table, rows.as_markdown(made))
    return {**figures, "rows": made}
