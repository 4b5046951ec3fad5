"""Experiment files: strict TOML, expanded into cells.

question = "..."            what the experiment asks (required)
expect   = "..."            what is expected, and how long it takes
[base]                      model, task, policy, seed, layers
[grid]                      "dotted.path" = [values]: every combination
[zip]                       "dotted.path" = [values]: lists walked together
[smoke]                     "dotted.path" = value: makes it small; "grid.dotted.path" = [values] replaces an axis
[verdict]                   accuracy_margin, nll_margin, alpha: see `Margins`
[check]                     for `kvlab check`: worst_margin, long_contexts, repetition_margin: see `Rules`
[search]                    for `kvlab run --search`: path, values, looks: see `kvlab.experiment.search.points`
[claim]                     for `kvlab claim`: see `kvlab.claims`

A cell's own config.toml, as results hold it (model, task, policy, seed and no question), is an experiment of that cell alone.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvlab import gates, parts
from kvlab.attention import PREFILL_BLOCK
from kvlab.decode import per_layer
from kvlab.errors import ConfigError, nearest
from kvlab.experiment.layers import Choice, LayerOverride, checked, known_keys, without_selection
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import calibrated
from kvlab.selection import double_sparsity
from kvlab.tasks import TASKS, Task

AXIS = "grid."
SEARCH = "search."
# options that name a file
FILES: dict[str, Callable[[str], Path]] = {
    "gate": gates.find,
    "filters": calibrated.find,
    "profile": calibrated.find,
    "calibration": double_sparsity.find,
}
S = TypeVar("S", bound=msgspec.Struct)


def _files(part: Any) -> Iterator[Path]:
    """The files that a part's table names, those of parts inside it included."""
    for key, value in part.items() if isinstance(part, dict) else ():
        if key in FILES and value:
            yield FILES[key](value)
        yield from _files(value)


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: a model, a task, a policy and a seed; `prefill_block` as in `Engine.prefill`."""

    model: dict[str, Any]
    task: dict[str, Any]
    policy: dict[str, Any] = {}
    layers: tuple[LayerOverride, ...] | Choice = ()
    seed: int = 0
    prefill_block: int = PREFILL_BLOCK

    @property
    def run_id(self) -> str:
        """A hash of everything above: the same config has the same id."""
        return hashlib.sha256(json.dumps(msgspec.to_builtins(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        other = "" if self.prefill_block == PREFILL_BLOCK else f" | prefill in blocks of {self.prefill_block}"
        return self._policies + other

    @property
    def _policies(self) -> str:
        if isinstance(self.layers, Choice):
            if self.layers.nowhere:
                return parts.describe(without_selection(self.policy))
            return f"{parts.describe(self.policy)} | {self.layers.label}"
        text = parts.describe(self.policy)
        return text + "".join(f" | {o.range[0]}–{o.range[1]}: {parts.describe(o.policy)}" for o in self.layers)

    @property
    def single_layer(self) -> int | None:
        """The layer in which alone the selection applies, if it is so."""
        return self.layers.single if isinstance(self.layers, Choice) else None

    @property
    def group(self) -> str:
        """Cells with the same group see the same prompts, so one prefill serves them all."""
        return json.dumps(msgspec.to_builtins((self.model, self.task, self.seed)), sort_keys=True)

    def make_task(self) -> Task:
        return parts.build(self.task, TASKS, "task")

    def make_policies(self, model: ModelConfig) -> tuple[Policy, ...]:
        """A policy for each layer; local ones keep their window, unless `layers` names them.

        Errors: ConfigError, RefusedPolicy.
        """
        if isinstance(self.layers, Choice):
            return self.layers.policies(self.policy, model)
        made = list(per_layer(parts.policy(self.policy), model))
        for override in self.layers:
            first, last = checked(override.range, model.layers)
            policy = parts.policy({**self.policy, **override.policy}, "layers.policy")
            made[first : last + 1] = [policy.at(layer, model) for layer in range(first, last + 1)]
        return tuple(made)

    def files(self) -> set[Path]:
        """Files whose content a result of this cell depends on: gates, filters, calibrations, a ranking. Errors: ConfigError."""
        tables = [self.policy]
        if not isinstance(self.layers, Choice):
            tables += [override.policy for override in self.layers]
        found = {file for table in tables for kind in ("selection", "retention") for file in _files(table.get(kind))}
        if isinstance(self.layers, Choice) and self.layers.ranking is not None:
            found.add(Path(self.layers.ranking).expanduser())
        return found

    def check(self) -> None:
        """Builds the task and the parts once. Errors: ConfigError, RefusedPolicy."""
        self.make_task()
        parts.policy(self.policy)
        if isinstance(self.layers, Choice):
            self.layers.check(self.policy)
            return
        for override in self.layers:
            parts.policy({**self.policy, **override.policy}, "layers.policy")


class Margins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Losses against the full cache that would matter, fixed before the run.

    `accuracy_margin` is a share (0.01 is one point), `nll_margin` nats a token, `alpha` the one-sided level of each verdict.
    """

    accuracy_margin: float = 0.01
    nll_margin: float = 0.01
    alpha: float = 0.05

    def __post_init__(self):
        if not (0 < self.accuracy_margin < 1 and self.nll_margin > 0 and 0 < self.alpha < 0.5):
            raise ConfigError(f"verdict: {self}; allowed: 0 < accuracy_margin < 1, nll_margin > 0, 0 < alpha < 0.5")


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `kvlab check` asks besides the margins (see `kvlab.experiment.regression.judge`).

    `worst_margin` is the share that the weakest cell may lose, `long_contexts` how many contexts above half of the model's
    maximum there must be (0: the worst case is not asked for), `repetition_margin` the share of repeated runs of tokens that a
    continuation may have more.
    """

    worst_margin: float = 0.2
    long_contexts: int = 10
    repetition_margin: float = 0.05

    def __post_init__(self):
        if not (0 < self.worst_margin < 1 and self.long_contexts >= 0 and 0 < self.repetition_margin < 1):
            raise ConfigError(f"check: {self}; allowed: margins above 0 and below 1, long_contexts from 0")


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a results folder came about: the table [origin] of its experiment.toml, which no file of one's own needs.

    `command` is run, check or claim; `source` the file that was named, "" for tables in Python; `cells` the folders of its cells.
    """

    name: str = ""
    command: str = "run"
    source: str = ""
    overrides: list[str] = []
    smoke: bool = False
    cells: list[str] = []


def origin(command: str, source: str | Path | dict, overrides: Sequence[str], smoke: bool) -> Origin:
    """What a command was asked for; `store.write_experiment` adds the rest."""
    return Origin("", command, "" if isinstance(source, dict) else str(source), list(overrides), smoke)


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it stands."""

    question: str
    expect: str = ""
    base: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    zip: dict[str, list[Any]] = {}
    smoke: dict[str, Any] = {}
    verdict: dict[str, Any] = {}
    check: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    origin: Origin | None = None
    claim: dict[str, Any] | None = None

    @property
    def rules(self) -> Rules:
        return convert(self.check or {}, Rules, "check")

    @property
    def margins(self) -> Margins:
        return convert(self.verdict, Margins, "verdict")


def read(source: str | Path | dict) -> tuple[str, Experiment]:
    """An experiment and its name, from a file or from the same tables in Python. Errors: ConfigError.

    Two files of a results folder are experiments as well: its experiment.toml, and the config.toml of a cell, which is one cell.
    """
    if isinstance(source, dict):
        return source.get("name", "experiment"), _experiment({k: v for k, v in source.items() if k != "name"}, "config")
    path = Path(source)
    raw = parts.read_toml(path)
    if {"model", "task"} <= set(raw) and "question" not in raw:
        cell = convert(raw, Cell, str(path))
        return cell.run_id, Experiment(f"one cell: {cell.label}, {cell.task.get('name')}, seed {cell.seed}", base=raw)
    made = _experiment(raw, str(path))
    return made.origin.name if made.origin else path.stem, made


def _experiment(raw: dict, where: str) -> Experiment:
    made = convert(raw, Experiment, where)
    _ = made.margins, made.rules  # a wrong table is refused before anything runs
    return made


def expand(experiment: Experiment, overrides: Iterable[str] = (), smoke: bool = False) -> list[Cell]:
    """All cells, in the file's order: the first grid axis varies slowest. Parts are built once to check them."""
    changes = [*(experiment.smoke.items() if smoke else ()), *map(parse_override, overrides)]
    axes = [[(path, value) for value in values] for path, values in _axes(experiment.grid, changes).items()]
    if len({len(v) for v in experiment.zip.values()}) > 1:
        raise ConfigError(f"zip: lists of different lengths: { {k: len(v) for k, v in experiment.zip.items()} }")
    together = [list(zip(experiment.zip, row)) for row in zip(*experiment.zip.values())] or [[]]
    tables = []
    for combination in itertools.product(*axes):
        for row in together:
            table = copy.deepcopy(experiment.base)
            for path, value in [*combination, *row]:
                _set(table, path, copy.deepcopy(value))
            tables.append(table)
    for path, value in changes:
        if not path.startswith((AXIS, SEARCH)):
            _override(tables, path, value)
    for table in tables:
        known_keys(table.get("layers"))
    cells = [convert(table, Cell, "cell") for table in tables]
    for cell in cells:
        cell.check()
    return list({cell.run_id: cell for cell in cells}.values())


def _axes(grid: dict[str, list[Any]], changes: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    """The grid with the axes that overrides "grid.…" replace. Errors: ConfigError."""
    made = dict(grid)
    for path, values in changes:
        if path.startswith(AXIS):
            axis = path.removeprefix(AXIS)
            if axis not in grid or not isinstance(values, list):
                raise ConfigError(f"{path} = {values!r}; allowed: a list for an axis of the grid; {nearest(axis, grid)}")
            made[axis] = values
    return made


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=c` with c as TOML writes it; what is no TOML value is taken as text."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text!r}; write --set task.length=1024")
    try:
        return path.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), value.strip()


def read_policies(options: Sequence[str], dtype: str | None, model: ModelConfig) -> tuple[str, tuple[Policy, ...]]:
    """A label and a policy per layer, from files and overrides such as "codec=int8" or "retention.size=512", in order.

    Args:
      dtype: short for the raw codec of that dtype.
    """
    table: dict[str, Any] = {}
    overrides: list[Any] | dict[str, Any] = []
    for option in options:
        if option.endswith(".toml"):
            more, overrides = parts.read_layers(option)
            table |= more
        elif "=" in option:
            _set_part(table, *parse_override(option))
        else:
            raise ConfigError(f"--policy {option!r}; write a .toml file or an override such as codec=int8")
    if dtype is not None:
        if "codec" in table:
            raise ConfigError(f"--dtype {dtype} and a codec in --policy are both given; --dtype is short for the raw codec")
        table["codec"] = {"name": "raw", "dtype": dtype}
    cell = _cell(table, overrides)
    if isinstance(cell.layers, Choice):
        cell.layers.check(table)
    return cell.label, cell.make_policies(model)


def _cell(table: dict[str, Any], overrides: list[Any] | dict[str, Any]):
    known_keys(overrides)
    try:
        return msgspec.convert({"model": {}, "task": {}, "policy": table, "layers": overrides}, Cell, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"layers: {error}; write layers = [{{ range = [0, 2], policy = {{ ... }} }}]") from error


def _set_part(table: dict[str, Any], path: str, value: Any) -> None:
    """Sets "kind" or "kind.option"; a part that was given as a name becomes a table."""
    kind, _, key = path.partition(".")
    old = table.get(kind, {})
    table[kind] = {**({"name": old} if isinstance(old, str) else old), key: value} if key else value


def _set(table: dict, path: str, value: Any) -> None:
    *folders, last = path.split(".")
    for folder in folders:
        table = table.setdefault(folder, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {folder} is no table")
    table[last] = value


def _override(tables: list[dict], path: str, value: Any) -> None:
    """Sets a path in every cell where it means something; in none is an error.

    Tasks and parts differ in their options, layers in form.
    """
    area, _, key = path.partition(".")
    fitting = tables
    if area == "layers" and key:
        fitting = [t for t in tables if isinstance(t.get("layers"), dict) and key in t["layers"]]
        if not fitting:
            raise ConfigError(f"{path}: no cell here has layers = {{ {key} = … }}; give it in the file")
    if area == "task" and key and key != "name":
        fitting = [t for t in tables if key in _options(t.get("task", {}))]
        if not fitting:
            known = set().union(*(_options(t.get("task", {})) for t in tables))
            raise ConfigError(f"{path}: no task here has the option {key!r}; {nearest(key, known)}")
    if area == "policy" and "." in key:
        fitting = [t for t in tables if key.rpartition(".")[2] in _part_options(t, key.rpartition(".")[0])] or tables
    for table in fitting:
        _set(table, path, copy.deepcopy(value))


def _part_options(table: dict[str, Any], kind: str) -> set[str]:
    """Options of a policy's part, none where it is left out."""
    chosen = table.get("policy", {}).get(kind)
    if not isinstance(chosen, dict) or "name" not in chosen or kind not in parts.KINDS:
        return set()
    return {f.name for f in dataclasses.fields(parts.find(chosen["name"], parts.KINDS[kind][0], kind))}


def _options(task: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(parts.find(task.get("name"), TASKS, "task"))}


def convert(raw: dict, kind: type[S], where: str) -> S:
    """msgspec's strict conversion, with unknown keys named beside their nearest neighbour."""
    if unknown := set(raw) - set(kind.__struct_fields__):
        key = sorted(unknown)[0]
        raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, kind.__struct_fields__)}")
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
