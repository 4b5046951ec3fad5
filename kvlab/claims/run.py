"""Runs a claim's experiment and judges it; what is kept of it stands in one JSON file and one picture."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvlab
from kvlab.claims import base, picture, reading, samples
from kvlab.claims.base import FAILS, HOLDS, OPEN, Finding
from kvlab.claims.column import Column
from kvlab.claims.reading import Claim
from kvlab.errors import ConfigError
from kvlab.experiment import config, environment, report, run, store

ACT = {HOLDS: "holds", FAILS: "fails", OPEN: "underpowered"}  # outcome → key of `claim.act`
SHOWN = ("samples", "accuracy", "accuracy_low", "accuracy_high", "kl_mean", "delta_nll", "delta_nll_low", "delta_nll_high",
         "resident_bytes", "read_bytes", "read_ratio")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A verdict and what it rests on; `policies` are figures of the experiment's table, by label."""

    name: str
    claim: Claim
    expect: str
    outcome: str
    alpha: float
    findings: list[Finding]
    policies: dict[str, dict[str, Any]]
    smoke: bool
    cells: int

    @property
    def sentence(self) -> str:
        """The verdict in words, with what decided it and what to do."""
        why, *others = [f for f in self.findings if f.decides and f.outcome == self.outcome]
        so = f" (and so: {'; '.join(other.name for other in others)})" if others else ""
        small = "A smoke run, which says nothing. " if self.smoke else ""
        return f"{small}The claim {_verb(self.outcome)}. {why.name}: {why.text}{so}. {self.claim.act[ACT[self.outcome]]}"

    def as_json(self) -> dict[str, Any]:
        findings = [store.plain(dataclasses.asdict(f)) for f in self.findings]
        claim = {key: getattr(self.claim, key) for key in ("statement", "source", "holds_if", "rule")}
        return {
            "name": self.name, **claim, "expect": self.expect, "outcome": self.outcome, "sentence": self.sentence,
            "alpha": self.alpha, "findings": findings, "policies": self.policies, "smoke": self.smoke, "cells": self.cells,
            "kvlab": kvlab.__version__, "code": environment.code_digest(),
        }  # fmt: skip


def _verb(outcome: str) -> str:
    return "is underpowered here: nothing was shown" if outcome == OPEN else outcome


def claim(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
    keep: str | Path | None = None,
    retry: bool = False,
) -> Judgement:
    """Runs what a file asks for and judges its claim; arguments and resuming as in `kvlab.run`.

    Writes claim.json and claim.png beside the results, and as NAME.json and NAME.png to `keep`. Errors: ConfigError for a
    table that is wrong or that names policies or tasks which the file does not have.
    """
    name, experiment = config.read(source)
    stated = reading.read(name, experiment)
    cells = config.expand(experiment, overrides, smoke) if experiment.base or experiment.grid else []
    if overrides and not cells:
        raise ConfigError(f"{name} runs no model, so there is no cell that {', '.join(overrides)} could change; edit its tests")
    reading.complete(stated, cells)
    origin = config.origin("claim", source, overrides, smoke)
    frame = run.execute(name, experiment, cells, Path(out), smoke, accept_stale, fresh, retry, origin) if cells else None
    folder = run.folder(name, Path(out), smoke)
    made = judge(name, stated, experiment, cells, folder, smoke, frame)
    write(made, folder / "claim")
    if keep is not None:
        write(made, Path(keep) / name)
    return made


def judge(name: str, stated: Claim, experiment: config.Experiment, cells: list[config.Cell], folder: Path, smoke: bool, frame):
    """The verdict on finished cells."""
    entropy = any(isinstance(test, Column) and test.column == "entropy" for test in stated.tests)
    table = samples.read(cells, folder, entropy)
    alpha = base.share(experiment.margins.alpha, stated.tests)
    findings = [test.find(table, alpha) for test in stated.tests]
    policies = {} if frame is None else report.as_json(frame)["policies"]
    policies = {label: {k: row[k] for k in SHOWN if k in row} for label, row in policies.items()}
    outcome = base.outcome(findings, stated.rule)
    return Judgement(name, stated, experiment.expect, outcome, alpha, findings, policies, smoke, len(cells))


def write(made: Judgement, place: Path) -> None:
    """`place` with .json and with .png."""
    store.write_text(place.with_name(f"{place.name}.json"), json.dumps(made.as_json(), indent=1, ensure_ascii=False) + "\n")
    picture.draw(made.claim, made.findings, place.with_name(f"{place.name}.png"))


def show(made: Judgement) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {HOLDS: "green", FAILS: "red", OPEN: "yellow"}
    level = base.level(made.alpha, bool(made.cells), [each.kind for each in made.findings])
    table = Table(title=escape(f"claim: {made.claim.statement}"), caption=escape(level) or None)
    for column in ("test", "decides", "what was seen", ""):
        table.add_column(column)
    for each in made.findings:
        outcome = f"[{colours[each.outcome]}]{each.outcome}[/]"
        table.add_row(escape(each.name), "yes" if each.decides else "", escape(each.text), outcome)
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    console.print(f"[{colours[made.outcome]}]{escape(made.sentence)}[/]")
