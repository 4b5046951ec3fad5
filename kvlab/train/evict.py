"""Files that train an importance gate, which decides what stays stored: strict TOML.

question = "..."            what the training asks (required)
expect   = "..."            what is expected, and how long it takes
model    = "smollm2-135m"   the base, which is only read
[importance]                the gate and its training: options of `kvlab.train.importance.Training`
[data]                      contexts, as for a read gate (`kvlab.train.gate.config.Data`), but prompts alone, without questions
teacher  = "replay"         "replay" of the context by the model, or "following" tokens of the context itself
held_out = 4                contexts that the best gate is chosen by
[smoke]                     "dotted.path" = value: makes it small
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
from kvlab.models import Model
from kvlab.train import importance
from kvlab.train.config import changed, convert, opened
from kvlab.train.gate import record
from kvlab.train.gate.config import Data
from kvlab.train.importance import Training
from kvlab.train.loop import environment
from kvlab.train.store import GATE, Folder


class Eviction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it stands."""

    question: str
    model: str
    data: Data
    expect: str = ""
    importance: dict[str, Any] = {}
    teacher: Literal["replay", "following"] = "replay"
    held_out: int = 4

    def __post_init__(self):
        if not 0 < self.held_out < self.data.contexts:
            raise ConfigError(
                f"held_out = {self.held_out} of data.contexts = {self.data.contexts}; hold some out and leave some to train on"
            )

    @property
    def options(self) -> Training:
        return Training(**parts.options(self.importance, Training, "importance", "the training"))


def is_eviction(table: dict[str, Any]) -> bool:
    """Whether the tables of a file describe an importance gate's training."""
    return "importance" in table


def read(source: str | Path | dict, overrides: Sequence[str] = (), smoke: bool = False) -> tuple[str, Eviction]:
    """A file's name and its training. Errors: ConfigError."""
    name, raw, changes = opened(source, "evict", overrides, smoke)
    made = convert(changed(raw, changes), Eviction, name, {"data": Data})
    _ = made.options  # a wrong table is refused before anything runs
    return name, made


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
    later training on the same contexts; a run that is stopped goes on with the next context.
    """
    name, training = read(source, overrides, smoke)
    compilation.use_private_cache()
    path = Path(out) / "train" / (f"{name}-smoke" if smoke else name)
    check_writable(path)
    with Folder(path, training, environment(), accept_stale, fresh) as folder:
        if done := folder.summary():
            return done
        begin, model = time.perf_counter(), models.load(training.model)
        shards = recorded(model, training, Path(out) / "records" / "importance")
        gate, log = importance.fit(shards[: -training.held_out], shards[-training.held_out :], training.options, model.config)
        for line in log:
            folder.log({"step": line["epoch"] + 1, **line})
        origin = {"trained": name, "model": training.model, "digest": model.digest}
        gates.save(gate, folder.path / GATE, origin, "float16")  # a million numbers, of which a rank is all that is used
        best = max(log, key=lambda line: line["overlap"])
        about = {"name": name, "parameters": gate.counts(), "total": sum(gate.counts().values())}
        figures = {"overlap": best["overlap"], "spearman": best["spearman"], "seconds": round(time.perf_counter() - begin, 1)}
        summary = {**about, **figures, "gate": str(folder.path / GATE)}
        folder.finish(summary)
    return summary


def recorded(model: Model, training: Eviction, folder: Path) -> importance.Shards:
    """The records of all contexts, in order; those that are missing are made."""
    shards: list[Path] = []
    with report.progress() as bar:
        task = bar.add_task(f"recording by {training.teacher}", total=training.data.contexts)
        for index in range(training.data.contexts):
            ids = record.prompt(training.data, model.tokenizer, index)
            shards += importance.recorded(model, [ids], folder, training.teacher, training.options.vectors).paths
            bar.update(task, advance=1)
    return importance.Shards(shards)
