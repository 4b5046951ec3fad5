"""One page on all claims of a folder, from the results that are kept beside them."""

from pathlib import Path
from typing import Any

from kvlab.claims import base, reading
from kvlab.errors import ConfigError
from kvlab.experiment import config, store

RESULTS = "results"  # folder of kept figures and pictures, beside the files
HEAD = """# Claims

Statements of articles about caches, each tested by an experiment file of this folder. What was expected stood in the file
before the run. A claim *holds* or *does not hold* where an interval says so; otherwise the run is *underpowered*, and says what
would settle it.
Written by `kvlab claim --page {page}` from `{folder}/`.

| claim | verdict |
|---|---|
"""


def write(page: Path) -> int:
    """Writes the page on the claims that lie in its folder, as Markdown; returns how many there are. Errors: ConfigError."""
    files = sorted(page.parent.glob("*.toml"))
    if not files:
        raise ConfigError(
            f"--page {page}: no claims in {page.parent}; write a page beside them, such as experiments/claims/README.md"
        )
    made = [_read(file) for file in files]
    lines = [_row(name, _stated(experiment, claim, kept), kept) for name, experiment, claim, kept in made]
    parts = [_section(file, name, experiment, claim, kept) for file, (name, experiment, claim, kept) in zip(files, made)]
    folder = page.parent / RESULTS
    store.write_text(page, HEAD.format(page=page, folder=folder) + "".join(lines) + "".join(parts))
    return len(files)


def _read(file: Path) -> tuple[str, config.Experiment, reading.Claim, dict[str, Any] | None]:
    name, experiment = config.read(file)
    kept = file.parent / RESULTS / f"{name}.json"
    return name, experiment, reading.read(name, experiment), store.read_json(kept) if kept.exists() else None


def _verdict(kept: dict[str, Any] | None) -> str:
    if kept is None:
        return "not run yet"
    return f"**{kept['outcome']}**" + (" (a smoke run, which says nothing)" if kept["smoke"] else "")


def _stated(experiment: config.Experiment, claim: reading.Claim, kept: dict[str, Any] | None) -> dict[str, Any]:
    """What was registered: what the run was made with, whatever became of the file since."""
    return kept or {"expect": experiment.expect, **{k: getattr(claim, k) for k in ("statement", "source", "holds_if")}}


def _row(name: str, stated: dict[str, Any], kept: dict[str, Any] | None) -> str:
    return f"| [{_cell(stated['statement'])}](#{name}) | {_verdict(kept)} |\n"


def _section(file: Path, name: str, experiment: config.Experiment, claim: reading.Claim, kept: dict[str, Any] | None) -> str:
    stated = _stated(experiment, claim, kept)
    lines = [
        f"\n## {name}\n",
        f"> {_line(stated['statement'])}\n",
        f"Source: {_line(stated['source'])}\n",
        f"Holds if: {_line(stated['holds_if'])}\n",
        f"Expected: {_line(stated['expect'])}\n",
        f"    kvlab claim {file}\n",
    ]
    if kept is not None:
        lines += [f"**Verdict.** {_line(kept['sentence'])}\n", _table(kept)]
        if (file.parent / RESULTS / f"{name}.png").exists():
            lines.append(f"![{name}]({RESULTS}/{name}.png)\n")
    else:
        lines.append("Not run yet.\n")
    return "\n".join(lines)


def _table(kept: dict[str, Any]) -> str:
    """What each test saw, and where a model ran, the figures by policy."""
    rows = ["| test | what was seen | |", "|---|---|---|"]
    for each in kept["findings"]:
        beside = "" if each["decides"] else " *(beside)*"
        rows.append(f"| {_cell(each['name'])}{beside} | {_cell(each['text'])} | {each['outcome']} |")
    level = base.level(kept["alpha"], bool(kept["policies"]), [each["kind"] for each in kept["findings"]])
    made = "\n".join(rows) + "\n" + (f"\n{level}\n" if level else "")
    made += "".join(_figures(each) for each in kept["findings"])
    if kept["policies"]:
        known = [c for c in FIGURES if any(c in row for row in kept["policies"].values())]
        rows = ["| policy | " + " | ".join(FIGURES[c][0] for c in known) + " |", "|---" * (len(known) + 1) + "|"]
        rows += [
            f"| {_cell(label)} | " + " | ".join(_figure(row, column) for column in known) + " |"
            for label, row in kept["policies"].items()
        ]
        made += "\n" + "\n".join(rows) + "\n"
    return made


def _figures(found: dict[str, Any]) -> str:
    """A test's own table, where it has one; findings that were kept before there were any have none."""
    if not found.get("table"):
        return ""
    columns = list(found["table"][0])
    rows = ["| " + " | ".join(map(_cell, columns)) + " |", "|---" * len(columns) + "|"]
    rows += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in found["table"]]
    return f"\n{_line(found['name'])}:\n\n" + "\n".join(rows) + "\n"


FIGURES = {
    "samples": ("samples", "{:,.0f}"),
    "accuracy": ("right", "{:.3f}"),
    "kl_mean": ("KL", "{:.4f}"),
    "delta_nll": ("ΔNLL", "{:+.4f}"),
    "resident_bytes": ("resident bytes", "{:,.0f}"),
    "read_bytes": ("bytes read a step", "{:,.0f}"),
}


def _figure(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else FIGURES[column][1].format(value)


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")
