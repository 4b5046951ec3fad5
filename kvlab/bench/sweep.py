"""What eight policies cost beside one on the same prompts: they share the prefill, and everything is compiled already."""

import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.bench.compiled import Compilations
from kvlab.experiment import config, run

POLICIES: tuple[dict[str, Any], ...] = (
    {"label": "full"},
    {"label": "window 512", "retention": {"name": "window", "sinks": 4, "size": 512}},
    {"label": "window 1024", "retention": {"name": "window", "sinks": 4, "size": 1024}},
    {"label": "snapkv", "retention": {"name": "snapkv", "ratio": 0.5}},
    {"label": "bfloat16", "codec": {"name": "raw", "dtype": "bfloat16"}},
    {"label": "INT8 per token", "codec": {"name": "int8"}},
    {"label": "INT8 per channel", "codec": {"name": "int8", "scale": "channel"}},
    {"label": "window 1024 + INT8", "retention": {"name": "window", "sinks": 4, "size": 1024}, "codec": {"name": "int8"}},
)


def main(model: str, length: int, contexts: int, needles: int, continuation: int, pairs: int) -> dict[str, Any]:
    """Median seconds of whole runs, tables and pictures among them, and the median ratio of pairs, for each set of tasks.

    `compilations` counts programs over everything that is warmed up, `compilations_warm` over everything that is timed.
    """
    needle = {"name": "needle", "length": length, "contexts": contexts, "needles": needles}
    likelihood = {"name": "likelihood", "length": length, "contexts": contexts, "continuation": continuation}
    figures: dict[str, Any] = {"model": model, "length": length, "contexts": contexts, "policies": len(POLICIES)}
    for name, tasks in (("needles", [needle]), ("with_likelihood", [needle, likelihood])):
        figures[name] = _measure(model, tasks, pairs)
        print(name, {key: round(value, 2) for key, value in figures[name].items()})
    return figures


def _measure(model: str, tasks: list[dict[str, Any]], pairs: int) -> dict[str, Any]:
    compiled = Compilations()
    seconds: dict[int, list[float]] = {1: [], len(POLICIES): []}
    for count in seconds:
        _run(model, tasks, count)
    warmed = compiled.count
    for _ in range(pairs):
        for count, taken in seconds.items():
            taken.append(_run(model, tasks, count))
    one, all_ = seconds.values()
    return {
        "seconds_one": float(np.median(one)),
        "seconds_all": float(np.median(all_)),
        "ratio": float(np.median(np.divide(all_, one))),
        "compilations": warmed,
        "compilations_warm": compiled.count - warmed,
    }


def _run(model: str, tasks: list[dict[str, Any]], count: int) -> float:
    """Seconds of an experiment with the first `count` policies, from nothing but its file."""
    tables = {
        "question": "What do eight policies cost beside one?",
        "base": {"model": {"name": model}},
        "grid": {"task": tasks, "policy": [dict(policy) for policy in POLICIES[:count]]},
    }
    name, experiment = config.read({"name": "sweep", **tables})
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        begin = time.perf_counter()
        run.execute(name, experiment, config.expand(experiment), Path(out), smoke=False, accept_stale=False, fresh=False)
        return time.perf_counter() - begin
