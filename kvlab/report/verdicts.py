"""What the page says first: for each policy pass, fail or underpowered, and why in words."""

import dataclasses
import math
from typing import Any

from kvlab.experiment import store
from kvlab.experiment.compare import REFERENCE, UNPAIRED
from kvlab.experiment.regression import judge
from kvlab.experiment.regression.judge import FAIL, OPEN, PASS, Finding
from kvlab.report.data import Results

NBSP = "\N{NO-BREAK SPACE}"  # an interval is not broken across lines


@dataclasses.dataclass(frozen=True)
class Judged:
    """A policy's outcome; `lines` are (rule, its outcome, a sentence)."""

    label: str
    outcome: str
    lines: list[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Unit:
    """How the differences of a rule are written."""

    scale: float
    digits: int
    name: str
    one: str
    items: str
    clusters: str

    def number(self, value: float, sign: str = "") -> str:
        return f"{value * self.scale:{sign}.{self.digits}f}".replace("-", "−")

    def margin(self, value: float) -> str:
        number = f"{value * self.scale:g}"
        return f"{number} {self.one if number == '1' else self.name}"


UNITS = {
    "answers": Unit(100, 1, "points", "point", "questions", "contexts"),
    "likelihood": Unit(1, 4, "nats a token", "nat a token", "tokens", "documents"),
}


def judged(results: Results) -> list[Judged]:
    """Every policy in the table's order; by what `kvlab check` found where the folder is a check's."""
    checked = _checked(results)
    return [_policy(results, label, checked.get(label)) for label in results.rows]


def _checked(results: Results) -> dict[str, list[Finding]]:
    path = results.folder / store.CHECK
    found = [_finding(each) for each in store.read_json(path)["findings"]] if path.exists() else []
    return {label: [each for each in found if each.policy == label] for label in {each.policy for each in found}}


def _finding(raw: dict[str, Any]) -> Finding:
    """What JSON has no number for was infinite."""
    ends = lambda name, value: value if value is not None else -math.inf if name == "low" else math.inf
    return Finding(**{**raw, "figures": {name: ends(name, value) for name, value in raw["figures"].items()}})


def _policy(results: Results, label: str, checked: list[Finding] | None) -> Judged:
    if label in results.full:
        return Judged(label, REFERENCE, [("", REFERENCE, "The full fp32 cache, which everything is compared with.")])
    rows, margins = results.rows[label], results.margins
    both = (judge.answers(label, rows, results.reference, margins), judge.likelihood(label, rows, margins))
    findings = checked or [each for each in both if each is not None]
    if not findings:
        return Judged(label, UNPAIRED, [("", UNPAIRED, "There is no sample that the full cache has answered as well.")])
    return Judged(label, judge.outcome(findings), [(each.rule, each.outcome, words(each)) for each in findings])


def words(finding: Finding) -> str:
    """The sentence of a finding: margin, interval, what was compared and, where it is open, what would settle it."""
    unit, figures = UNITS.get(finding.rule), finding.figures
    if unit is None or "low" not in figures:
        return finding.text
    margin = unit.margin(figures["margin"])
    start = {
        PASS: f"A loss of {margin} or more is excluded",
        FAIL: f"The loss is larger than {margin}",
        OPEN: f"Too few samples to say whether {margin} or more is lost",
    }[finding.outcome]
    low, high = (unit.number(figures[end], "+") for end in ("low", "high"))
    seen = f"{unit.number(figures['difference'], '+')}{NBSP}[{low},{NBSP}{high}]{NBSP}{unit.name.replace(' ', NBSP)}"
    of = f"{figures['items']:,} {unit.items} in {figures['clusters']:,} {unit.clusters}"
    more = [_needed(unit, figures)] if finding.outcome == OPEN else []
    more += [f"{figures['reason'].capitalize()}."] if figures.get("reason") else []
    return " ".join([f"{start}: {seen}, of {of}.", *more])


def _needed(unit: Unit, figures: dict[str, Any]) -> str:
    if not math.isfinite(figures["items_needed"]):
        return f"It takes more than one of the {unit.clusters}."
    effect = figures["minimum_detectable_effect"]
    most = 1.0 if unit is UNITS["answers"] else math.inf  # shares cannot differ by more
    settled = f"These settle {unit.number(effect)} {unit.name}; " if effect < most else "These settle no margin; "
    needed, clusters = figures["items_needed"], figures["clusters_needed"]
    takes = f"{needed:,.0f} {unit.items} in {clusters:,.0f} {unit.clusters}"
    return f"{settled}a margin of {unit.margin(figures['margin'])} takes {takes}."


def margins(results: Results) -> list[str]:
    """The losses that would matter, in words."""
    accuracy, nll = results.margins.accuracy_margin, results.margins.nll_margin
    return [f"{UNITS['answers'].margin(accuracy)} of accuracy", UNITS["likelihood"].margin(nll)]


def counts(made: list[Judged]) -> dict[str, int]:
    """How many policies passed, failed and stayed open."""
    return {outcome: sum(each.outcome == outcome for each in made) for outcome in (PASS, FAIL, OPEN)}
