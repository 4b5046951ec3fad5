"""Training files: strict TOML.

question = "..."            what the training asks (required)
expect   = "..."            what is expected, and how long it takes
seed, log, save             seed of weights and data; steps between lines of the log, and between checkpoints
[model]                     the transformer's shape
[optimiser]                 AdamW's options
[[stages]]                  the curriculum, in order: steps, rows, and a context's length, pairs, queries
[[evaluate]]                held-out contexts at the end: options of the task mqar
[smoke]                     "dotted.path" = value: makes it small; a number in a path counts the list's tables from 0
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvlab import parts
from kvlab.errors import ConfigError
from kvlab.experiment import config
from kvlab.models.config import ModelConfig
from kvlab.tasks import TASKS, Mqar
from kvlab.tasks.mqar import WORDS

S = TypeVar("S", bound=msgspec.Struct)


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The transformer's shape; see `kvlab.models.config.ModelConfig`. The vocabulary is the task's."""

    layers: int = 2
    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 1088
    rope_base: float = 1e4


class Optimiser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW (https://arxiv.org/abs/1711.05101): the rate rises over `warmup` steps, then falls as a cosine to `last` × rate.

    `decay` is of matrices only; `clip` is the largest norm of a gradient.
    """

    rate: float = 3e-3
    warmup: int = 50
    last: float = 0.05
    decay: float = 0.1
    clip: float = 1.0


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one shape, so that each stage is compiled once."""

    steps: int
    rows: int
    length: int
    pairs: int
    queries: int

    def task(self) -> Mqar:
        return Mqar(self.length, 1, self.pairs, self.queries)


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it stands."""

    question: str
    stages: tuple[Stage, ...]
    expect: str = ""
    seed: int = 0
    log: int = 10
    save: int = 50
    model: Shape = Shape()
    optimiser: Optimiser = Optimiser()
    evaluate: tuple[dict[str, Any], ...] = ()

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def shape(self) -> ModelConfig:
        return ModelConfig(vocab=len(WORDS), **msgspec.structs.asdict(self.model))

    def tasks(self) -> list[Mqar]:
        """What is evaluated at the end. Errors: ConfigError."""
        if any(table.get("known") for table in self.evaluate):
            raise ConfigError("evaluate: known = true; here keys are asked for once the cache is filled, leave it out")
        return [parts.build({"name": "mqar", **table}, TASKS, "evaluate") for table in self.evaluate]

    def stage(self, step: int) -> tuple[int, Stage]:
        """The stage that the step, counted from 1, belongs to, and its number from 1."""
        for number, stage in enumerate(self.stages, 1):
            if step <= stage.steps:
                return number, stage
            step -= stage.steps
        raise ValueError(f"step {step} lies after the last stage")


def read(source: str | Path | dict, overrides: Iterable[str] = (), smoke: bool = False) -> tuple[str, Training]:
    """A training and its name, from a file or from the same tables in Python. Errors: ConfigError."""
    name, raw, changes = opened(source, "training", overrides, smoke)
    return name, _checked(convert(changed(raw, changes), Training, name, {"model": Shape, "optimiser": Optimiser}, Stage))


def opened(source: str | Path | dict, unnamed: str, overrides: Iterable[str], smoke: bool):
    """A file's name, its tables without [smoke], and what is to change in them: pairs of a dotted path and a value."""
    if isinstance(source, dict):
        name, raw = source.get("name", unnamed), {k: v for k, v in source.items() if k != "name"}
    else:
        name, raw = Path(source).stem, parts.read_toml(source)
    small = raw.pop("smoke", {})
    return name, raw, [*(small.items() if smoke else ()), *map(config.parse_override, overrides)]


def changed(raw: dict[str, Any], changes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A copy of the tables with the changes made. Errors: ConfigError."""
    table = msgspec.json.decode(msgspec.json.encode(raw))
    for path, value in changes:
        override(table, path, value)
    return table


def override(table: Any, path: str, value: Any) -> None:
    """Sets a dotted path in nested tables and lists. Errors: ConfigError."""
    *folders, last = path.split(".")
    for folder in folders:
        table = _item(table, folder, path)
    if isinstance(table, list):
        _item(table, last, path)
        table[int(last)] = value
    elif isinstance(table, dict):
        table[last] = value
    else:
        raise ConfigError(f"--set {path}: nothing has options there; write --set optimiser.rate=1e-3 or stages.0.steps=10")


def _item(table: Any, key: str, path: str) -> Any:
    """The table in a table, made if it is missing, or the key-th of a list."""
    if isinstance(table, dict):
        return table.setdefault(key, {})
    if isinstance(table, list) and key.isdigit() and int(key) < len(table):
        return table[int(key)]
    allowed = f"0 … {len(table) - 1}" if isinstance(table, list) else "nothing"
    raise ConfigError(f"--set {path}: no {key!r} there; allowed: {allowed}")


def convert(table: dict, kind: type[S], where: str, sections: dict[str, Any], stage: Any = None) -> S:
    """Each table by itself, so that an unknown key is named beside the keys of its own table.

    `sections` are the structs of tables by name, `stage` that of every table in the list `stages`. Errors: ConfigError.
    """
    made = dict(table)
    for key, struct in sections.items():
        if isinstance(table.get(key), dict):
            made[key] = config.convert(table[key], struct, f"{where}: {key}")
    if stage is not None and isinstance(table.get("stages"), list):
        one = lambda i, s: config.convert(s, stage, f"{where}: stages.{i}") if isinstance(s, dict) else s
        made["stages"] = tuple(one(i, s) for i, s in enumerate(table["stages"]))
    return config.convert(made, kind, where)


def _checked(training: Training) -> Training:
    """Errors: ConfigError for numbers that cannot work."""
    shape = training.model
    if not training.stages:
        raise ConfigError("stages: there are none; write [[stages]] with steps, rows, length, pairs and queries")
    for where, table in (("", training), ("model.", shape), *((f"stages.{i}.", s) for i, s in enumerate(training.stages))):
        for name, value in msgspec.structs.asdict(table).items():
            if name != "seed" and isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"{where}{name} = {value}; allowed: more than 0")
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise ConfigError(
            f"model: heads={shape.heads}, kv_heads={shape.kv_heads}, head_dim={shape.head_dim}; "
            "heads must be a multiple of kv_heads, head_dim even"
        )
    for task in [*(stage.task() for stage in training.stages), *training.tasks()]:
        if task.length + task.queries > shape.context:
            raise ConfigError(f"length={task.length} and queries={task.queries} exceed model.context={shape.context}; raise it")
    if not 0 <= training.optimiser.warmup < training.steps:
        raise ConfigError(
            f"optimiser.warmup = {training.optimiser.warmup}; allowed: 0 … {training.steps - 1}, as steps there are"
        )
    return training
