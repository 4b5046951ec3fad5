"""`kvlab report`: a results folder as one page that needs nothing else, and its figures as JSON."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import kvlab
from kvlab.errors import ResultsError
from kvlab.experiment import picture, report, store
from kvlab.report import data, depths, figures, kept, layers, origin, samples, verdicts
from kvlab.report.data import Results

PAGE = "report.html"
EXTRA = {  # columns of the table besides those of a run's own
    "accuracy_difference": ("against full, points", "{:+.1f}"),
    "drift": ("drift", "{:.4f}"),
    "kept_share": ("answer kept", "{:.3f}"),
    "read_share": ("answer read", "{:.3f}"),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """What the table shows of a policy in one column: text, its interval or what it needs, and what it is sorted by."""

    text: str
    more: str
    sort: float | str


def write(folder: str | Path, out: str | Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Writes the page (`out`, by default report.html in the folder) and its PNGs beside it; returns its path and figures.

    Errors: ResultsError, ConfigError.
    """
    results = data.read(folder)
    path = Path(out) if out is not None else results.folder / PAGE
    if path.is_dir():
        raise ResultsError(f"--out {path} is a folder; give a file, such as {path / PAGE}")
    judged = verdicts.judged(results)
    store.write_text(path, _render(results, judged, path))
    return path, as_json(results, judged)


def as_json(results: Results, judged: list[verdicts.Judged]) -> dict[str, Any]:
    """Question, verdicts with their sentences, Pareto fronts and the table."""
    about = {"name": results.name, "question": results.experiment.question, "expect": results.experiment.expect}
    made = {each.label: {"outcome": each.outcome, "lines": each.lines} for each in judged}
    return {**about, "verdicts": made, "fronts": fronts(results.frame), **report.as_json(results.frame)}


def fronts(frame) -> dict[str, list[str]]:
    """For each measure of quality the policies that no other beats."""
    return {column: picture.front(frame, column) for column in picture.PANELS if column in frame}


def _render(results: Results, judged: list[verdicts.Judged], path: Path) -> str:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.PackageLoader("kvlab.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    panels = {"entropy of attention, nats": layers.entropy(results), "drift of its output, relative": layers.drifts(results)}
    beside = lambda what: path.with_name(f"{path.stem}-{what}.png")
    return env.get_template("page.html.j2").render(
        results=results,
        experiment=results.experiment,
        judged=judged,
        counts=verdicts.counts(judged),
        margins=verdicts.margins(results),
        level=f"{1 - 2 * results.margins.alpha:.0%}",
        one_sided=f"{1 - results.margins.alpha:.0%}",
        bytes_picture=figures.bytes_against_quality(results.frame, beside("bytes")),
        fronts=fronts(results.frame),
        columns=columns(results.frame),
        rows=table(results.frame),
        caption=report.caption(results.experiment, results.frame).split("\n"),
        maps=depths.maps(results),
        bins=depths.BINS,
        layers_picture=figures.by_layer(panels, results.full, beside("layers")),
        layers_names=[heading for heading, series in panels.items() if series],
        texts=kept.texts(results),
        limits={"prompts": kept.PROMPTS, "tokens": kept.TOKENS, "policies": kept.POLICIES},
        shown=samples.shown(results),
        environment=origin.environment(results),
        commands=origin.commands(results),
        version=kvlab.__version__,
    )


def columns(frame) -> dict[str, str]:
    """Columns of the table and their headings."""
    shown = {name: heading for name, (heading, _) in {**report.SHOWN, **EXTRA}.items() if name in frame}
    return {name: heading for name, heading in shown.items() if name != "read_ratio" or report.reads_less(frame)}


def table(frame) -> list[tuple[str, str, dict[str, Figure]]]:
    """(policy, fronts it is on, figures by column) for each row."""
    best = fronts(frame)
    scaled = frame.assign(resident_bytes=frame["resident_bytes"] / 1e6)
    names = {column: report.SHOWN[column][0] for column in best}
    made = []
    for _, row in scaled.iterrows():
        on = ", ".join(names[column] for column in best if row["policy"] in best[column])
        made.append((row["policy"], on, {column: _figure(row, column) for column in columns(frame)}))
    return made


def _figure(row, column: str) -> Figure:
    value = row[column]
    if value is None or value != value:
        return Figure("–", "", "" if column.endswith("verdict") else -math.inf)
    if column == "accuracy_difference":
        points = [f"{100 * row[column + end]:+.1f}" for end in ("", "_low", "_high")]
        return Figure(_minus(points[0]), _minus(f"[{points[1]}, {points[2]}]"), float(value))
    if column in EXTRA:
        return Figure(EXTRA[column][1].format(value), "", float(value))
    if isinstance(value, str):
        return Figure(value, report.cell(row, column).removeprefix(value).strip(), value)
    text, _, more = report.cell(row, column).partition(" ")
    return Figure(_minus(text), _minus(more), float(value))


def _minus(text: str) -> str:
    return text.replace("-", "−")
