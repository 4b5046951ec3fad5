"""From a file to a gate: recorded data, stages that can be killed and continued, the best gate kept, decoded at the end."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import compilation, gates, models, parts
from kvlab.experiment import report
from kvlab.experiment.store import check_writable
from kvlab.models import Model
from kvlab.selection import SELECTIONS
from kvlab.train.export import export
from kvlab.train.gate import config, step
from kvlab.train.gate import report as grid_report
from kvlab.train.gate.config import GateTraining
from kvlab.train.gate.evaluate import decoded
from kvlab.train.gate.record import Records, layers
from kvlab.train.gate.step import Recorded, State, Trainer
from kvlab.train.loop import environment
from kvlab.train.store import GATE, Folder


def train(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Trains every gate that a file describes and returns their summaries; finished ones are only read.

    Arguments and errors as in `kvlab.train.loop.train`. The gate of a file without a grid is
    `<out>/train/<name>/gate.safetensors`, and `model/` beside it is the base as it was trained, if it was.
    """
    name, trainings = config.read(source, overrides, smoke)
    compilation.use_private_cache()
    root = Path(out) / "train" / (f"{name}-smoke" if smoke else name)
    check_writable(root)
    made = []
    for label, training in trainings.items():
        path = root / "".join(c if c.isalnum() or c in ".-" else "_" for c in label) if label else root
        with Folder(path, training, environment(), accept_stale, fresh) as folder:
            summary = folder.summary() or _train(label or name, training, folder, Path(out))
        made.append({"label": label, **summary})
    if len(made) > 1:
        grid_report.finish(name, next(iter(trainings.values())).question, made, root)
    return made


def record(source: str | Path | dict, overrides: Sequence[str] = (), smoke: bool = False, out: str | Path = "results"):
    """Only records what a file's trainings need: the folders."""
    _, trainings = config.read(source, overrides, smoke)
    compilation.use_private_cache()
    folders = [Records.of(models.load(t.model), t.data, out).folder for t in trainings.values()]
    return list(dict.fromkeys(folders))


def _train(name: str, training: GateTraining, folder: Folder, out: Path) -> dict[str, Any]:
    model = models.load(training.model)
    fit = Fit(name, training, model, Records.of(model, training.data, out), folder)
    state = fit.run()
    origin = {"trained": name, "model": training.model, "digest": model.digest, "selection": training.table()}
    gates.save(fit.trainer.gate(_copied(state.best["gate"])), folder.path / GATE, origin)
    if training.joint:
        trained = {"trained": name, "base": training.model}
        words = [model.tokenizer.decode([i]) for i in range(model.config.vocab)]
        export(folder.path / "model", model.config, state.best["base"], words, trained)
    lines = folder.lines()
    summary = {
        "name": name,
        "parameters": fit.gate.counts(),
        "total": sum(fit.gate.counts().values()),
        "steps": int(lines[-1]["step"]),
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "metric": training.validate.metric,
        "best": float(state.score) * training.validate.sign,
        "gate": str(folder.path / GATE),
        "evaluate": decoded(model, training, folder.path),
    }
    folder.finish(summary)
    return summary


class Fit:
    """One gate being trained."""

    def __init__(self, name: str, training: GateTraining, model: Model, records: Records, folder: Folder):
        self.name, self.training, self.model, self.records, self.folder = name, training, model, records, folder
        self.gate = make(training, model)
        selection = parts.build(training.table(), SELECTIONS, "selection")
        self.trainer = Trainer(model.config, self.gate, selection, layers(model, training.data))
        self._recall, self._judge = jax.jit(self.trainer.recorded), jax.jit(self.trainer.judge)
        self.held_out = list(range(training.data.contexts - training.validate.contexts, training.data.contexts))

    def run(self) -> State:
        """The steps that are left, from the newest checkpoint on."""
        trained = {"gate": _copied(self.gate.values()), **({"base": _copied(self.model.params)} if self.training.joint else {})}
        copy = jax.tree.map(np.array, trained)  # steps donate their state, so nothing of it may be shared
        self.state = State(trained, step.rule(self.training.stages[0]).init(trained), copy, jnp.float32(-jnp.inf), jnp.int32(0))
        begin = 0
        with report.progress() as self.bar:
            self.task = self.bar.add_task(self.name, total=self.training.steps)
            done, self.state = self._restore()
            for number, stage in enumerate(self.training.stages):
                if done < begin + stage.steps and not (done > begin and self._stopped()):
                    self._stage(number, begin, max(done - begin, 0))
                begin += stage.steps
                self.bar.update(self.task, completed=begin)
        return self.state

    def _restore(self) -> tuple[int, State]:
        """Checkpoints of different stages differ in shape, so the template is the stage's own."""
        number = self.folder.newest()
        begin = 0
        for stage in self.training.stages:
            begin += stage.steps
            if number <= begin:
                template = self.state._replace(optimiser=step.rule(stage).init(self.state.trained))
                return self.folder.restore(template)
        return self.folder.restore(self.state)

    def _stage(self, number: int, begin: int, done: int) -> None:
        stage, target = self.training.stages[number], self.trainer.selection.sparsity
        rule = step.rule(stage)
        if not done:  # a stage goes on from the best so far, not from the last
            trained = _copied(self.state.best)
            self.state = self.state._replace(trained=trained, optimiser=rule.init(trained), since=jnp.int32(0))
        advance = self.trainer.compiled(stage, rule)
        before = time.perf_counter()
        for i in range(done + 1, stage.steps + 1):
            now, last = begin + i, i == stage.steps
            self.state, figures = advance(self.state, self.model.params, self._data(stage, now), step.annealed(stage, i, target))
            judged = self._validate() if i % self.training.validate.every == 0 or last else {}
            if now % self.training.log == 0 or judged:
                line = {"step": now, "stage": number + 1, **{k: float(v) for k, v in figures.items()}, **judged}
                before, seconds = time.perf_counter(), time.perf_counter() - before
                self.folder.log({**line, "seconds": round(seconds, 3)})
                text = f"{self.name} {number + 1}/{len(self.training.stages)} loss {line['loss']:.4f}"
                self.bar.update(self.task, description=text)
            if now % self.training.save == 0 or last or self._stopped():
                self.folder.save(now, self.state)
            self.bar.update(self.task, completed=now)
            if self._stopped():
                break

    def _stopped(self) -> bool:
        """Whether the stage has gone on without a better gate for as long as it may."""
        return 0 < self.training.validate.patience <= int(self.state.since)

    def _data(self, stage, now: int):
        rng = np.random.default_rng([self.training.seed, now])
        picked = rng.choice(self.held_out[0], min(stage.contexts, self.held_out[0]), replace=False)
        return self._recorded(picked) if stage.loss == "kl" else self.records.batch(picked)

    def _recorded(self, indices) -> Recorded:
        shards = [self.records.load(int(i)) for i in indices]
        return Recorded(*(np.stack([s[name] for s in shards]) for name in Recorded._fields))

    def _validate(self) -> dict[str, float]:
        """Figures on the held-out contexts; the best gate so far is kept in the state."""
        metric, found = self.training.validate.metric, []
        for index in self.held_out:
            if metric == "recall":
                found.append(self._recall_of(index))
            else:
                found.append(self._judge(self.state.trained, self.model.params, self.records.batch([index])))
        mean = {f"held_out_{name}": float(np.mean([f[name] for f in found])) for name in found[0]}
        score = jnp.float32(mean[f"held_out_{metric}"] * self.training.validate.sign)
        if score > self.state.score:
            best = jax.tree.map(np.array, self.state.trained)
            self.state = self.state._replace(best=best, score=score, since=jnp.int32(0))
        else:
            self.state = self.state._replace(since=self.state.since + 1)
        return mean

    def _recall_of(self, index: int) -> dict[str, Any]:
        sparsity = np.float32(self.trainer.selection.sparsity)
        return {"recall": self._recall(self.state.trained["gate"], self._recorded([index]), sparsity)[1]}


def make(training: GateTraining, model: Model) -> gates.Gate:
    """The untrained gate of a file. Errors: ConfigError."""
    given = {key: value for key, value in training.gate.items() if key != "kind"}
    c = model.config
    shape = {"layers": c.layers, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    options = parts.options(given, gates.GateConfig, "gate", training.kind)
    return gates.make(training.kind, gates.GateConfig(**shape | options), training.seed)


def _copied(values):
    return jax.tree.map(jnp.array, values)
