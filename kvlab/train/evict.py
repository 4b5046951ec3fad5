"""Files that train an importance gate, which decides what stays stored: strict TOML.

question = "..."            what the training asks (required)
expect   = "..."            what is expected, and how long it takes
model    = "smollm2-135m"   the base, which is only read
[data]                      contexts, as for a read gate (`kvlab.train.gate.config.Data`)
held_out = 4                contexts that the best gate is chosen by
[smoke]                     "dotted.path" = value: makes it small

and one of these two tables:

[importance]                learns a recorded importance: options of `kvlab.train.importance.Training`. Contexts are prompts
                            alone, without questions.
teacher  = "replay"         of importance: "replay" of the context by the model, or "following" tokens of the context itself
[dms]                       learns through the model, for the retention `dms`: options of `kvlab.train.dms.step.Training`. Of a
                            text's tokens all count, of a task's its answers.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvlab import compilation, gates, models, parts
from kvlab.errors import ConfigError
from kvlab.experiment import report
from kvlab.experiment.store import check_writable
from kvlab.gates import ImportanceGate
from kvlab.models import Model
from kvlab.train import importance
from kvlab.train.config import changed, convert, opened
from kvlab.train.dms import step as through
from kvlab.train.dms.loop import Fit
from kvlab.train.gate import record
from kvlab.train.gate.config import Data
from kvlab.train.importance import Training
from kvlab.train.loop import environment
from kvlab.train.store import GATE, Folder


class Eviction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both kinds of files have."""

    question: str
    model: str
    data: Data
    expect: str = ""
    held_out: int = 4

    def __post_init__(self):
        if not 0 < self.held_out < self.data.contexts:
            raise ConfigError(
                f"held_out = {self.held_out} of data.contexts = {self.data.contexts}; hold some out and leave some to train on"
            )
        _ = self.options  # a wrong table is refused before anything runs

    @property
    def options(self) -> Any:
        """The training's own table as its dataclass. Errors: ConfigError."""
        raise NotImplementedError

    def fit(self, name: str, model: Model, folder: Folder, out: Path) -> tuple[ImportanceGate, dict[str, Any]]:
        """The best gate, and figures."""
        raise NotImplementedError


class ByImportance(Eviction, frozen=True):
    """A file with [importance]."""

    importance: dict[str, Any] = {}
    teacher: Literal["replay", "following"] = "replay"

    @property
    def options(self) -> Training:
        return Training(**parts.options(self.importance, Training, "importance", "the training"))

    def fit(self, name, model, folder, out):
        begin, shards = time.perf_counter(), recorded(model, self, out / "records" / "importance")
        gate, log = importance.fit(shards[: -self.held_out], shards[-self.held_out :], self.options, model.config)
        for line in log:
            folder.log({"step": line["epoch"] + 1, **line})
        best = max(log, key=lambda line: line["overlap"])
        seconds = round(time.perf_counter() - begin, 1)
        return gate, {"overlap": best["overlap"], "spearman": best["spearman"], "seconds": seconds}


class ThroughModel(Eviction, frozen=True):
    """A file with [dms]."""

    dms: dict[str, Any] = {}

    @property
    def options(self) -> through.Training:
        return through.Training(**parts.options(self.dms, through.Training, "dms", "the training"))

    def fit(self, name, model, folder, out):
        return Fit(name, model, self.data, self.held_out, self.options, folder).run()


FILES: dict[str, type[Eviction]] = {"importance": ByImportance, "dms": ThroughModel}


def is_eviction(table: dict[str, Any]) -> bool:
    """Whether the tables of a file describe such a training."""
    return any(kind in table for kind in FILES)


def read(source: str | Path | dict, overrides: Sequence[str] = (), smoke: bool = False) -> tuple[str, Eviction]:
    """A file's name and its training. Errors: ConfigError."""
    name, raw, changes = opened(source, "evict", overrides, smoke)
    given = [kind for kind in FILES if kind in raw]
    if len(given) != 1:
        raise ConfigError(f"{name}: tables {given}; write one of {', '.join(f'[{kind}]' for kind in FILES)}")
    return name, convert(changed(raw, changes), FILES[given[0]], name, {"data": Data})


def train(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
) -> dict[str, Any]:
    """Trains the gate of a file and returns its summary; arguments and errors as in `kvlab.train.loop.train`.

    The gate is `<out>/train/<name>/gate.safetensors`. What is recorded lies in `<out>/records/importance` and serves every
    later training on the same contexts; a run that is stopped goes on with the next context, or from its last validation.
    """
    name, training = read(source, overrides, smoke)
    compilation.use_private_cache()
    path = Path(out) / "train" / (f"{name}-smoke" if smoke else name)
    check_writable(path)
    with Folder(path, training, environment(), accept_stale, fresh) as folder:
        if done := folder.summary():
            return done
        model = models.load(training.model)
        gate, figures = training.fit(name, model, folder, Path(out))
        origin = {"trained": name, "model": training.model, "digest": model.digest}
        gates.save(gate, folder.path / GATE, origin, "float16")  # a million numbers, of which a rank is all that is used
        about = {"name": name, "parameters": gate.counts(), "total": sum(gate.counts().values())}
        summary = {**about, **figures, "gate": str(folder.path / GATE)}
        folder.finish(summary)
    return summary


def recorded(model: Model, training: ByImportance, folder: Path) -> importance.Shards:
    """The records of all contexts, in order; those that are missing are made."""
    shards: list[Path] = []
    with report.progress() as bar:
        task = bar.add_task(f"recording by {training.teacher}", total=training.data.contexts)
        for index in range(training.data.contexts):
            ids = record.prompt(training.data, model.tokenizer, index)
            shards += importance.recorded(model, [ids], folder, training.teacher, training.options.vectors).paths
            bar.update(task, advance=1)
    return importance.Shards(shards)
