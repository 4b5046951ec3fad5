"""Files that train a gate: strict TOML.

question = "..."            what the training asks (required)
expect   = "..."            what is expected, and how long it takes
model    = "tiny-recall"    the base, frozen unless a stage says joint
seed, log, save             seed of gate and order; steps between lines of the log, and between checkpoints
[gate]                      kind and shape: options of `kvlab.gates.GateConfig`
[selection]                 how decoding will select: options of the selection, see `kvlab.selection`
[data]                      what is recorded from the base: a text or a task, and how much of it
[[stages]]                  losses, in order
[validate]                  hard selection on held-out contexts while training: the best gate is kept
[[evaluate]]                tasks that are decoded at the end, with the full cache and with the gate
[grid]                      "dotted.path" = [values]: a training for every combination; [[grid]] for several such grids
[smoke]                     "dotted.path" = value: makes it small
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvlab import parts
from kvlab.errors import ConfigError
from kvlab.selection import SELECTIONS
from kvlab.tasks import TASKS
from kvlab.train.config import changed, convert, opened

KINDS = {"spatial": "hysparse", "lightning": "lightning"}  # of gates, and the selection that decodes with them


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the base's queries and keys are recorded from.

    Attributes:
      texts, tasks: sources of `kvlab.tasks.text` and tables of tasks, taken in turn. A text gives `length` tokens; a task
        its prompt with all questions and answers after it.
      contexts: how many, held-out ones included.
      queries: positions per context whose queries are recorded: any of a text's second half; answers, then questions, then
        the prompt's second half.
      decoded: tokens at a text's end that are read as decoding reads, by stages through the model; what comes before is
        prefilled, as a task's prompt is.
      layers: which; all without a local window by default.
      dtype: of what is stored.
    """

    contexts: int
    texts: tuple[str, ...] = ()
    tasks: tuple[dict[str, Any], ...] = ()
    length: int = 1024
    queries: int = 128
    decoded: int = 256
    layers: tuple[int, ...] = ()
    dtype: Literal["float16", "float32"] = "float16"
    seed: int = 0

    def __post_init__(self):
        if not self.texts and not self.tasks:
            raise ConfigError('data: no source; write texts = ["docstrings"], or tasks = [{ name = "mqar" }], or both')
        if min(self.contexts, self.length, self.queries) < 1:
            raise ConfigError(f"data: contexts, length and queries must be 1 or more; given {self}")


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps with one loss.

    Attributes:
      loss: "kl" (to the base's attention, on recorded queries and keys); "straight_through" (through the model, which
        reads what the gate picks; its gradient is that of a sigmoid around the last token picked); "soft" (through the
        model, with the sigmoid itself).
      contexts: per step.
      rate, base_rate: peak learning rates, falling as a cosine.
      anneal: steps over which sparsity rises from 0 to its target.
      distil, lm, kl: weights of the logits' KL to the base, of the next token's cross-entropy, of the attention's KL.
      ratio: weight of (share read − target)², for gates with thresholds.
      width: of the sigmoid, in scores.
      joint: the base is trained too, at base_rate; detach: the gate's inputs pass no gradient to it.
    """

    steps: int
    loss: Literal["kl", "straight_through", "soft"] = "kl"
    contexts: int = 1
    rate: float = 1e-2
    warmup: int = 10
    last: float = 0.05
    anneal: int = 0
    distil: float = 1.0
    lm: float = 1.0
    kl: float = 0.1
    ratio: float = 0.0
    width: float = 1.0
    joint: bool = False
    base_rate: float = 1e-4
    detach: bool = True


class Validate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Held-out judgement, always by hard selection at the target sparsity.

    Attributes:
      every: steps between validations; contexts: held out of the data for it.
      metric: "recall" (share of the base's attention that is read, from records), "agreement" (share of positions where
        the model's first choice is the base's), "accuracy" (of the answers): the highest is kept; or "distil" (KL from the
        base's next-token distributions): the lowest is.
      patience: validations without a better one before a stage ends; 0 for no limit.
    """

    every: int = 50
    contexts: int = 4
    metric: Literal["recall", "agreement", "accuracy", "distil"] = "recall"
    patience: int = 0

    @property
    def sign(self) -> int:
        """What the metric is multiplied by, so that more is better."""
        return -1 if self.metric == "distil" else 1


class GateTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it stands, less its grid."""

    question: str
    model: str
    data: Data
    stages: tuple[Stage, ...]
    expect: str = ""
    seed: int = 0
    log: int = 10
    save: int = 100
    gate: dict[str, Any] = {}
    selection: dict[str, Any] = {}
    validate: Validate = Validate()
    evaluate: tuple[dict[str, Any], ...] = ()

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def joint(self) -> bool:
        return any(stage.joint for stage in self.stages)

    @property
    def kind(self) -> str:
        return self.gate.get("kind", "spatial")

    def table(self, gate: str = "") -> dict[str, Any]:
        """The selection as a policy's table, with a gate's path."""
        return {"name": KINDS[self.kind], **self.selection, **({"gate": gate} if gate else {})}

    def tasks(self) -> list[Any]:
        return [parts.build(table, TASKS, "evaluate") for table in self.evaluate]


def is_gate(table: dict[str, Any]) -> bool:
    """Whether the tables of a file describe a gate's training."""
    return "gate" in table or "data" in table


def read(source: str | Path | dict, overrides: Iterable[str] = (), smoke: bool = False):
    """A file's name and its trainings by label ("" where it has no grid). Errors: ConfigError."""
    name, raw, changes = opened(source, "gate", overrides, smoke)
    grids = raw.pop("grid", {})
    grids = grids if isinstance(grids, list) else [grids]
    instead = {path.removeprefix("grid."): value for path, value in changes if path.startswith("grid.")}
    changes = [(path, value) for path, value in changes if not path.startswith("grid.")]
    made = {}
    for point in (point for grid in grids for point in _points(grid, instead)):
        table = changed(raw, [*((path, _value(value)) for path, value in point), *changes])
        training = convert(table, GateTraining, name, {"data": Data, "validate": Validate}, Stage)
        made[", ".join(f"{path} {_label(value)}" for path, value in point)] = _checked(training)
    return name, made


def _points(grid: dict[str, list[Any]], instead: dict[str, list[Any]]):
    """Every combination of a grid's values, some axes with other values than the file's."""
    for path, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid: {path} = {values!r}; write a list of values")
    return itertools.product(*([(path, value) for value in instead.get(path, values)] for path, values in grid.items()))


def _value(value: Any) -> Any:
    """A grid's value: {label = "...", value = ...} names what would be long to print."""
    return value["value"] if isinstance(value, dict) and set(value) == {"label", "value"} else value


def _label(value: Any) -> str:
    return str(value["label"] if isinstance(value, dict) and "label" in value else value)


def _checked(training: GateTraining) -> GateTraining:
    """Errors: ConfigError for what cannot work."""
    if training.kind not in KINDS:
        raise ConfigError(f"gate: kind={training.kind!r}; allowed: {', '.join(KINDS)}")
    if not training.stages:
        raise ConfigError("stages: there are none; write [[stages]] with loss and steps")
    if not 0 < training.validate.contexts < training.data.contexts:
        raise ConfigError(
            f"validate.contexts = {training.validate.contexts} of data.contexts = {training.data.contexts}; "
            "some must be held out and some left to train on"
        )
    for i, stage in enumerate(training.stages):
        if not 0 <= stage.warmup < stage.steps:
            raise ConfigError(f"stages.{i}: warmup = {stage.warmup}; allowed: 0 … {stage.steps - 1}, as steps there are")
        if stage.joint and stage.loss == "kl":
            raise ConfigError(f'stages.{i}: joint trains through the model; write loss = "straight_through" or "soft"')
    selection = parts.build(training.table(), SELECTIONS, "selection")
    if selection.granularity != "token":
        raise ConfigError("selection: gates are trained to pick tokens; leave granularity out, and decode by page if need be")
    if (selection.mode == "threshold") != bool(training.gate.get("threshold", False)):
        raise ConfigError('selection.mode = "threshold" and gate.threshold = true go together; give both or neither')
    training.tasks()
    return training
