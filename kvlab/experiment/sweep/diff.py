"""`kvlab diff`: two results beside each other, experiments or single cells, by what lies on disk.

Cells are the same where their ids are, and belong together where policy label, task and seed agree; then their configs differ.
Figures are means over the cells that belong together. A verdict is on the samples that both have: of the same model, task, seed,
batch and place, and of the same text. It asks whether the second loses against the first.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvlab.errors import ResultsError
from kvlab.experiment import compare, store
from kvlab.experiment.config import Cell, Margins, convert

ENVIRONMENT = (*store.SAME, "kvlab", "jax", "python", "platform")
FIGURES = ("accuracy", "kl_mean", "delta_nll", "resident_bytes", "read_ratio", "tokens_per_s", "ms_per_token_p50")
MARGINS = Margins()


@dataclasses.dataclass(frozen=True)
class Side:
    """A cell as it lies in a folder; `run` as in `store`, `env` what it was made with."""

    cell: Cell
    run: store.Run
    env: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.cell.label}, {self.cell.task['name']}, seed {self.cell.seed}"


Pairs = list[tuple[Side, Side]]


def diff(first: str | Path, second: str | Path, margins: Margins = MARGINS) -> dict[str, Any]:
    """What differs between two folders of results, as one object that JSON can hold. Errors: ResultsError.

    only_first, only_second: names of cells
    config: by cell, dotted key → the two values
    made_with: digest or version → the pairs of values that occur, where they differ
    policies: by label, figures of both and verdicts
    """
    one, two = sides(Path(first)), sides(Path(second))
    together = pairs(one, two)
    taken = {id(side) for pair in together for side in pair}
    return {
        "only_first": [side.name for side in one if id(side) not in taken],
        "only_second": [side.name for side in two if id(side) not in taken],
        "config": {a.name: changed for a, b in together if (changed := changes(a.cell, b.cell))},
        "made_with": made_with(together),
        "policies": {label: beside(same, margins) for label, same in by_policy(together)},
    }


def sides(folder: Path) -> list[Side]:
    """The cells in a results folder, or the one whose folder it is. Errors: ResultsError where there are none."""
    found = [folder] if (folder / "config.toml").exists() else sorted(path.parent for path in folder.glob("*/config.toml"))
    if not found:
        raise ResultsError(f"{folder} holds no runs; give results/<experiment>, or results/<experiment>/<run_id>")
    return [_side(each) for each in found]


def _side(folder: Path) -> Side:
    try:
        raw = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{folder / 'config.toml'} cannot be read ({error}); remove its folder and run again") from error
    cell, about = convert(raw, Cell, str(folder / "config.toml")), folder / "env.json"
    return Side(cell, store.Run(folder.parent, cell, folder.name), store.read_json(about) if about.exists() else {})


def pairs(one: Sequence[Side], two: Sequence[Side]) -> Pairs:
    """Cells that belong together; two single cells do, whatever they are. The first rule that holds takes a cell."""
    if len(one) == len(two) == 1:
        return [(one[0], two[0])]
    made: Pairs = []
    left = list(two)
    for key in (lambda c: c.run_id, lambda c: (c.label, json.dumps(c.task, sort_keys=True), c.seed), _loosely):
        taken = {id(a) for a, _ in made}
        for side in (side for side in one if id(side) not in taken):
            other = next((each for each in left if key(each.cell) == key(side.cell)), None)
            if other is not None:
                made.append((side, other))
                left.remove(other)
    order = {id(side): i for i, side in enumerate(one)}
    return sorted(made, key=lambda pair: order[id(pair[0])])


def _loosely(cell: Cell) -> tuple:
    return cell.label, cell.task["name"], cell.seed


def changes(one: Cell, two: Cell) -> dict[str, list[Any]]:
    """Keys of the config whose values differ, dotted; None stands for a key that is not there."""
    a, b = (dict(_flat(msgspec.to_builtins(cell))) for cell in (one, two))
    return {key: [a.get(key), b.get(key)] for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif value not in ({}, []):
        yield path, value


def made_with(together: Pairs) -> dict[str, list[list[Any]]]:
    """Digests and versions that differ, each with the pairs of values that occur."""
    found: dict[str, list[list[Any]]] = {}
    for a, b in together:
        for key in ENVIRONMENT:
            values = [a.env.get(key), b.env.get(key)]
            if values[0] != values[1] and values not in found.setdefault(key, []):
                found[key].append(values)
    return found


def by_policy(together: Pairs) -> list[tuple[str, Pairs]]:
    """The pairs by the first one's label."""
    found: dict[str, Pairs] = {}
    for pair in together:
        found.setdefault(pair[0].cell.label, []).append(pair)
    return list(found.items())


def beside(same: Pairs, margins: Margins) -> dict[str, Any]:
    """Figures of one policy, `[first, second]` each, null where it was not measured, and verdicts on the samples of both."""
    summaries = [[_summary(side) for side in column] for column in zip(*same)]
    figures = {name: [_mean(column, name) for column in summaries] for name in FIGURES}
    ours, theirs = _samples(same)
    made: dict[str, Any] = {"figures": {name: v for name, v in figures.items() if v != [None, None]}, "samples": len(ours)}
    made["identical"] = sum(_plain(row) == _plain(theirs[key]) for key, row in ours.items())
    answers = compare.answers(theirs, ours, margins.accuracy_margin, margins.alpha)
    known = {key: {**row, "nll_reference": ours[key]["nll"]} for key, row in theirs.items() if "nll" in row}
    tokens = compare.tokens(known, margins.nll_margin, margins.alpha)
    for name, found in (("accuracy", answers), ("nll", tokens)):
        if found is not None:
            made[name] = store.plain(dataclasses.asdict(found))
    return made


def _samples(same: Pairs) -> tuple[compare.Samples, compare.Samples]:
    """Rows of both that are about the same samples, under the same keys."""
    alike = [(a, b) for a, b in same if a.cell.group == b.cell.group and a.env.get("text") == b.env.get("text")]
    one, two = (_rows([pair[i] for pair in alike]) for i in (0, 1))
    return {key: row for key, row in one.items() if key in two}, {key: row for key, row in two.items() if key in one}


def _rows(column: list[Side]) -> compare.Samples:
    return {(side.cell.group, *key): row for side in column for key, row in side.run.rows()}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row is the outcome, not the memory."""
    return {key: row[key] for key in ("answer", "correct", "nll", "kl") if key in row}


def _summary(side: Side) -> dict[str, Any]:
    path = side.run.folder / "summary.json"
    return store.read_json(path) if path.exists() else {}


def _mean(summaries: list[dict[str, Any]], name: str) -> float | None:
    values = [each[name] for each in summaries if isinstance(each.get(name), int | float) and math.isfinite(each[name])]
    return sum(values) / len(values) if values else None
