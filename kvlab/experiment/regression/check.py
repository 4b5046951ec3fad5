"""`kvlab check`: did a policy hurt? An experiment with controls, judged by rules that were fixed beforehand.

The file is an experiment with a [check] table. On the samples of its policies there run besides: the full fp32 cache, which
everything is compared with; caches in float16 and bfloat16; and an A/A control, the full cache after a prefill in other blocks,
whose difference is the noise of the measurement.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvlab.attention import PREFILL_BLOCK
from kvlab.errors import ConfigError
from kvlab.experiment import compare, config, group, run, store
from kvlab.experiment.regression import drift, judge
from kvlab.experiment.regression.judge import Finding

CODE = {judge.PASS: 0, judge.FAIL: 1, judge.OPEN: 3}  # exit codes
AA = "A/A"
HALF = {name: {"label": name, "codec": {"name": "raw", "dtype": name}} for name in ("float16", "bfloat16")}
AA_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The outcome and what it rests on: findings, drift by policy (`drift.py`), and the experiment's table."""

    outcome: str
    findings: list[Finding]
    drift: dict[str, Any]
    frame: Any

    def as_json(self) -> dict[str, Any]:
        findings = [dataclasses.asdict(each) for each in self.findings]
        return store.plain({"outcome": self.outcome, "findings": findings, "drift": self.drift})


def check(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
    retry: bool = False,
) -> Judgement:
    """Runs what a file and the rules ask for and judges it; arguments and resuming as in `kvlab.run`.

    Errors: ConfigError for a file without [check], without questions or without likelihood, or with nothing to judge.
    """
    name, experiment = config.read(source)
    if experiment.check is None:
        raise ConfigError(f"{name}: no [check] table; write one, empty for the usual rules, or use kvlab run")
    asked = config.expand(experiment, overrides, smoke)
    subjects = list(dict.fromkeys(cell.label for cell in asked if not compare.is_full(cell)))
    _complete(name, asked, subjects)
    cells = with_controls(asked)
    origin = config.origin("check", source, overrides, smoke)
    frame = run.execute(name, experiment, cells, Path(out), smoke, accept_stale, fresh, retry, origin)
    folder = run.folder(name, Path(out), smoke)
    findings = judged(cells, folder, experiment, subjects)
    made = Judgement(judge.outcome(findings), findings, drift.figures(cells, folder), frame)
    store.write_text(folder / store.CHECK, json.dumps(made.as_json(), indent=1))
    return made


def with_controls(cells: list[config.Cell]) -> list[config.Cell]:
    """The cells, and for each set of samples the controls that are not among them."""
    sets = {cell.group: cell for cell in cells}.values()

    def control(cell, policy, block=PREFILL_BLOCK):
        return msgspec.structs.replace(cell, layers=(), policy=policy, prefill_block=block)

    controls = [control(cell, {"label": "full"}) for cell in sets if not any(map(compare.is_full, _same(cell, cells)))]
    controls += [control(cell, policy) for cell in sets for policy in HALF.values()]
    controls += [control(cell, {"label": AA}, AA_BLOCK) for cell in sets]
    return list({cell.run_id: cell for cell in [*cells, *controls]}.values())


def _same(cell: config.Cell, cells: list[config.Cell]) -> list[config.Cell]:
    return [other for other in cells if other.group == cell.group]


def judged(cells: list[config.Cell], folder: Path, experiment: config.Experiment, subjects: list[str]) -> list[Finding]:
    """Findings on the policies of the file, then on the measurement."""
    of = lambda wanted: compare.samples([cell for cell in cells if wanted(cell)], folder)
    reference, margins, rules = of(compare.is_full), experiment.margins, experiment.rules
    made = []
    for label in subjects:
        models = {group.model_name(cell.model) for cell in cells if cell.label == label}
        context = min(group.engine(model).config.context for model in models)
        rows = of(lambda cell, label=label: cell.label == label)
        made += judge.of_policy(label, rows, reference, margins, rules, context)
    control = next(cell.label for cell in cells if cell.prefill_block == AA_BLOCK)
    return [*made, judge.noise(control, of(lambda cell: cell.label == control), reference, margins)]


def _complete(name: str, cells: list[config.Cell], subjects: list[str]) -> None:
    """Errors: ConfigError where the rules cannot be asked."""
    if not subjects:
        raise ConfigError(f'{name}: every policy is the full cache; name one to judge, such as codec = {{ name = "int8" }}')
    tasks = {cell.task["name"] for cell in cells}
    if "likelihood" not in tasks or not tasks - {"likelihood", "continuation"}:
        raise ConfigError(
            f"{name}: tasks {', '.join(sorted(tasks))}; a check needs one with answers, such as needle, and likelihood: "
            "either alone hides losses"
        )


def show(made: Judgement) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {judge.PASS: "green", judge.FAIL: "red", judge.OPEN: "yellow"}
    table = Table(title="findings")
    for column in ("rule", "policy", "verdict", "what was seen"):
        table.add_column(column)
    for each in made.findings:
        table.add_row(each.rule, escape(each.policy), f"[{colours[each.outcome]}]{each.outcome}[/]", escape(each.text))
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    console.print(drift.table(made.drift))
    console.print(f"[{colours[made.outcome]}]{made.outcome}[/]")


def write_junit(made: Judgement, name: str, path: Path) -> None:
    """A test case for each finding; what failed is a failure, what is underpowered an error."""
    from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

    suite, kinds = TestSuite(name), {judge.FAIL: Failure, judge.OPEN: Error}
    for each in made.findings:
        case = TestCase(f"{each.policy}: {each.rule}", classname=name)
        if each.outcome in kinds:
            case.result = [kinds[each.outcome](each.text, each.outcome)]
        else:
            case.system_out = each.text
        suite.add_testcase(case)
    xml = JUnitXml()
    xml.add_testsuite(suite)
    with store.writing(path) as part:
        xml.write(str(part), pretty=True)
