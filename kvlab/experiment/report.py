"""What a run shows when it is done: tables, a picture, and the frame behind them."""

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlab.experiment import causes, compare, config, picture, ranking, reads, store

TIME_COLUMNS = ("tokens_per_s", "ms_per_token_p50", "ms_per_token_p99", "time_to_first_token")

# what the table shows: column → heading, format; beside it stand its interval, or what an open verdict needs
SHOWN = {
    "accuracy": ("accuracy", "{:.3f}"),
    "verdict": ("verdict", "{}"),
    "kl_mean": ("KL mean", "{:.4f}"),
    "kl_99": ("KL 99 %", "{:.3f}"),
    "same_top1": ("same top-1", "{:.3f}"),
    "delta_nll": ("ΔNLL", "{:+.4f}"),
    "nll_verdict": ("NLL verdict", "{}"),
    "resident_bytes": ("resident MB", "{:.1f}"),
    "nominal_ratio": ("nominal", "{:.3f}"),
    "logical_ratio": ("logical", "{:.3f}"),
    "resident_ratio": ("resident", "{:.3f}"),
    "read_ratio": ("read", "{:.3f}"),
    "tokens_per_s": ("tok/s", "{:.1f}"),
    "ms_per_token_p50": ("p50 ms", "{:.1f}"),
    "ms_per_token_p99": ("p99 ms", "{:.1f}"),
    "time_to_first_token": ("first token s", "{:.2f}"),
}
INTERVALS = {"accuracy": "{:.2f}", "delta_nll": "{:+.3f}"}
NEEDS = {"verdict": ("items_needed", "needs {:,.0f}"), "nll_verdict": ("documents_needed", "needs {:,.0f} documents")}


def progress():
    """A progress bar with the time left, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    # a label may have brackets
    return Progress(TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True))


def counter(bar, name: str, cells: Sequence[config.Cell], folder: Path) -> Callable[[str], None]:
    """A function that brings a progress bar to what lies on disk, whoever put it there, under the words that it is given."""
    runs = [(store.Run(folder, cell), cell.make_task().count()) for cell in cells]
    task = bar.add_task(name, total=sum(count for _, count in runs))

    def show(words: str) -> None:
        done = sum(count if each.failed else len(each.numbers()) for each, count in runs)
        bar.update(task, completed=done, **({"description": words} if words else {}))

    return show


def finish(name: str, experiment: config.Experiment, cells: list[config.Cell], folder: Path):
    """Writes table.parquet, samples.parquet and the picture, prints the table, returns the frame with a row per policy."""
    import pandas as pd

    table = pd.DataFrame([store.read_json(folder / cell.run_id / "summary.json") for cell in cells])
    each = samples(cells, folder)
    for file, rows in (("table.parquet", table), ("samples.parquet", each)):
        with store.writing(folder / file) as part:
            rows.to_parquet(part)
    frame = with_verdicts(by_policy(table), compare.columns(cells, folder, experiment.margins))
    drawn = picture.draw(frame, folder / f"{name}.png")
    ranked = ranking.write(cells, folder)
    show(
        experiment,
        frame,
        [path for path in (folder / "table.parquet", folder / "samples.parquet", drawn, ranked) if path],
        [by_task(table, cells), causes_table(causes.table(cells, folder))],
    )
    print(f"all of it on one page: {shlex.join(['kvlab', 'report', str(folder)])}")
    return frame


def samples(cells: list[config.Cell], folder: Path):
    """A frame with a row per sample: what it is of, and its scalars. What is a number here and a text there becomes text."""
    import pandas as pd

    frame = pd.DataFrame(
        {"run_id": cell.run_id, "policy": cell.label, "task": cell.task["name"], "seed": cell.seed, "batch": batch, "sample": i}
        | {name: value for name, value in row.items() if isinstance(value, str | int | float | None)}
        for cell in cells
        for (batch, i), row in store.Run(folder, cell).rows()
    )
    for name in frame.select_dtypes("object"):
        known = frame[name].dropna()
        if known.map(type).nunique() > 1:
            frame[name] = known.map(str)
    return frame


def by_policy(table):
    """One row per policy: the mean over seeds and tasks of every figure that a task gives."""
    figures = table.select_dtypes("number").columns.difference(["seed"])
    order = table["policy"].drop_duplicates()
    frame = table.groupby("policy", sort=False)[list(figures)].mean().loc[order].reset_index()
    # speed and memory of the task that answers questions, where there is one: tasks differ in batch and length
    first = table.groupby("policy", sort=False).first()
    memory = ["resident_bytes", "full_bytes", "nominal_ratio", "logical_ratio", "resident_ratio"]
    for column in [*TIME_COLUMNS, *memory, *reads.COLUMNS]:
        if column in first:
            frame[column] = first.loc[order, column].to_numpy()
    counts = table.groupby("policy", sort=False)["samples"].sum()
    frame["samples"] = counts.loc[order].to_numpy()
    shown = [c for c in SHOWN if c in frame]
    return frame[["policy", *shown, *[c for c in frame if c not in shown and c != "policy"]]]


def with_verdicts(frame, made: dict[str, dict[str, Any]]):
    """The frame with the columns of `compare.columns`, in the table's order."""
    import pandas as pd

    frame = frame.merge(pd.DataFrame.from_dict(made, orient="index"), left_on="policy", right_index=True)
    shown = [c for c in SHOWN if c in frame]
    return frame[["policy", *shown, *[c for c in frame if c not in shown and c != "policy"]]]


def cell(row, column: str) -> str:
    """A figure as the table shows it, with its interval or what an open verdict needs."""
    text = SHOWN[column][1].format(row[column])
    if column in INTERVALS and f"{column}_low" in row:
        low, high = (INTERVALS[column].format(row[f"{column}_{end}"]) for end in ("low", "high"))
        return f"{text} [{low}, {high}]"
    if row[column] == "underpowered":
        needed, words = NEEDS[column]
        return f"{text} ({words.format(row[needed]) if math.isfinite(row[needed]) else 'one cluster'})"
    return text


def caption(experiment: config.Experiment, frame) -> str:
    lines = ["bytes are per sequence, all layers; ratios are to the full fp32 cache"]
    margins = experiment.margins
    if "accuracy_low" in frame or "delta_nll_low" in frame:
        lines.append(f"[low, high]: {1 - 2 * margins.alpha:.0%} intervals, by context or document")
    if reads_less(frame):
        lines.append("read: bytes that a step reads, index keys and positions among them, over the full fp32 cache's")
    if "verdict" in frame or "nll_verdict" in frame:
        accuracy, nll = margins.accuracy_margin, margins.nll_margin
        lines.append(
            f"pass: loss against the full cache under {accuracy:g} of accuracy, {nll:g} nats (one-sided {margins.alpha:g})"
        )
    return "\n".join(lines)


def reads_less(frame) -> bool:
    """Whether a policy reads less than the full fp32 cache, by more than half of what the table's last digit says."""
    return "read_ratio" in frame and bool((frame["read_ratio"] < 0.9995).any())


def show(experiment: config.Experiment, frame, files: list[Path], more: list) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=experiment.question, caption=caption(experiment, frame))
    columns = [c for c in SHOWN if c in frame and (c != "read_ratio" or reads_less(frame))]
    table.add_column("policy", min_width=16)
    for column in columns:
        table.add_column(SHOWN[column][0], justify="right")
    scaled = frame.assign(resident_bytes=frame["resident_bytes"] / 1e6)
    for _, row in scaled.iterrows():
        table.add_row(row["policy"], *(cell(row, c) for c in columns))
    console = Console(width=None if Console().is_terminal else 240, markup=False)  # labels and questions may have brackets
    console.print(table)
    for other in filter(None, more):
        console.print(other)
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True)


def by_task(table, cells: list[config.Cell]):
    """Accuracy of each policy in each task, the mean over seeds, tasks named by what sets them apart; None for a single task."""
    from rich.table import Table

    asked = [cell.task for cell in cells]
    options = dict.fromkeys(key for task in asked for key in task if len({str(other.get(key)) for other in asked}) > 1)
    words = [" ".join(task[o] if o == "name" else f"{o} {task[o]}" for o in options if o in task) for task in asked]
    known = table.assign(words=words)[table.get("accuracy", table["seed"] * math.nan).notna()]
    if known["words"].nunique() < 2:
        return None
    figures = known.pivot_table("accuracy", "policy", "words", sort=False)
    shown = Table(title="accuracy by task", caption="the mean over seeds")
    for i, column in enumerate(["policy", *figures.columns]):
        shown.add_column(column, justify="right" if i else "left", min_width=16 if i == 0 else None)
    for label, row in figures.iterrows():
        shown.add_row(str(label), *map("{:.3f}".format, row))
    return shown


def causes_table(lost: dict[str, dict[str, int]]):
    """How many answers each policy lost, and to what (see `kvlab.experiment.causes`); None where no task tells."""
    from rich.table import Table

    if not lost:
        return None

    table = Table(
        title="why answers were lost", caption="number of samples, by the first cause that holds; model: full is wrong too"
    )
    for i, column in enumerate(["policy", "samples", *causes.CAUSES]):
        table.add_column(column, justify="right" if i else "left")
    for label, counts in lost.items():
        table.add_row(label, *(str(counts[column]) for column in ("samples", *causes.CAUSES)))
    return table


def as_json(frame) -> dict[str, Any]:
    """The frame as one object, policies by label, under the frame's own column names; what was not measured is null."""
    plain = lambda v: v.item() if hasattr(v, "item") else v
    known = lambda v: None if isinstance(v, float) and not math.isfinite(v) else plain(v)
    rows = frame.to_dict(orient="records")
    return {"policies": {row.pop("policy"): {k: known(v) for k, v in row.items()} for row in rows}}
