"""From a training file to a model: steps that can be killed and continued, an export, held-out figures."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvlab
from kvlab import compilation, models
from kvlab.experiment import report
from kvlab.experiment.environment import code_digest
from kvlab.experiment.store import check_writable
from kvlab.tasks.mqar import WORDS
from kvlab.train import config, init, step
from kvlab.train.evaluate import held_out
from kvlab.train.export import export
from kvlab.train.store import Folder


def train(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
) -> dict[str, Any]:
    """Trains what a file (or the same tables as a dict) describes and returns its summary; a finished one is only read.

    Args:
      overrides: "dotted.path=value" strings, as after `--set`.
      smoke: use the file's [smoke] overrides; results go to a folder of their own.
      out: folder of results; this training's is `train/<name>` in it.
      accept_stale: go on with other code than the steps so far were made with.
      fresh: discard what there is so far.
    Errors: KvlabError with one clear line; checkpoints stay.
    """
    name, training = config.read(source, overrides, smoke)
    compilation.use_private_cache()
    path = Path(out) / "train" / (f"{name}-smoke" if smoke else name)
    check_writable(path)
    with Folder(path, training, environment(), accept_stale, fresh) as folder:
        if done := folder.summary():
            return done
        params = fit(training, folder, name)
        export(folder.path / "model", training.shape(), params, WORDS, {"trained": name, "steps": training.steps})
        model = dataclasses.replace(models.load(str(folder.path / "model")), name=name)
        lines = folder.lines()
        seconds = sum(line["seconds"] for line in lines)
        about = {"name": name, "parameters": count(params), "steps": training.steps, "seconds": round(seconds, 1)}
        summary = {**about, "loss": lines[-1]["loss"], **held_out(model, training)}
        folder.finish(summary)
    return summary


def fit(training: config.Training, folder: Folder, name: str) -> Any:
    """Runs the steps that are left and returns the parameters."""
    shape = training.shape()
    rule = step.adamw(training.optimiser, training.steps)
    params = init.parameters(shape, training.seed)
    first, state = folder.restore(step.State(params, rule.init(params)))
    advance = step.compiled(shape, rule)
    before = time.perf_counter()
    with report.progress() as bar:
        task = bar.add_task(name, total=training.steps, completed=first)
        for now in range(first + 1, training.steps + 1):
            number, stage = training.stage(now)
            state, loss, right = advance(state, step.batch(stage, training.seed, now))
            last = now == training.steps
            if now % training.log == 0 or last:
                line = {"step": now, "stage": number, "loss": float(loss), "accuracy": float(right)}
                before, seconds = time.perf_counter(), time.perf_counter() - before
                folder.log({**line, "seconds": round(seconds, 3)})
                bar.update(task, description=f"{name} {number}/{len(training.stages)} loss {line['loss']:.4f}")
            if now % training.save == 0 or last:
                folder.save(now, state)
            bar.update(task, advance=1)
    return state.params


def count(params: Any) -> int:
    return sum(int(np.size(x)) for x in jax.tree.leaves(params))


def environment() -> dict[str, str]:
    return {"code": code_digest(), "kvlab": kvlab.__version__, "jax": jax.__version__}
