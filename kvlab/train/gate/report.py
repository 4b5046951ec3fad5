"""What a file with a grid shows when all its gates are trained: a table, a picture, and the frame behind them."""

import re
from pathlib import Path
from typing import Any

from kvlab.experiment.store import writing


def finish(name: str, question: str, made: list[dict[str, Any]], folder: Path):
    """Prints a row per kind of training, seeds joined; writes table.parquet and the picture; returns the frame."""
    import pandas as pd

    frame = pd.DataFrame([_row(summary) for summary in made])
    with writing(folder / "table.parquet") as part:
        frame.to_parquet(part)
    show(question, frame)
    draw(frame, folder / f"{name}.png")
    for file in (folder / "table.parquet", folder / f"{name}.png"):
        print(f"wrote {file}")
    return frame


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    """One training; accuracies are means over its evaluations."""
    kind = re.sub(r"(^|, )seed \d+(, )?", "", summary["label"]) or "plain"
    row = {"training": kind, "label": summary["label"], "parameters": summary["total"], summary["metric"]: summary["best"]}
    for column in ("gate", "full"):
        if summary["evaluate"]:
            row[f"decoded, {column}"] = sum(e[column] for e in summary["evaluate"]) / len(summary["evaluate"])
    return {**row, "seconds": summary["seconds"]}


def show(question: str, frame) -> None:
    from rich.console import Console
    from rich.table import Table

    figures = [c for c in frame.columns if c not in ("training", "label")]
    table = Table(title=question, caption="mean over seeds [lowest, highest]; held out, by hard selection")
    table.add_column("training")
    for heading in ("seeds", *figures):
        table.add_column(heading, justify="right")
    for kind, rows in frame.groupby("training", sort=False):
        spread = lambda column: f"{column.mean():.3f} [{column.min():.3f}, {column.max():.3f}]"
        plain = lambda column: f"{column.mean():,.0f}"
        cells = [plain(rows[c]) if c in ("parameters", "seconds") else spread(rows[c]) for c in figures]
        table.add_row(str(kind), str(len(rows)), *cells)
    Console(width=None if Console().is_terminal else 160).print(table)


def draw(frame, path: Path) -> None:
    """A dot per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    column = (
        "decoded, gate" if "decoded, gate" in frame else next(c for c in frame if c not in ("training", "label", "parameters"))
    )
    kinds = list(dict.fromkeys(frame["training"]))[::-1]
    figure, axis = plt.subplots(figsize=(7, 0.5 * len(kinds) + 1.2))
    for place, kind in enumerate(kinds):
        values = frame.loc[frame["training"] == kind, column]
        axis.plot(values, [place] * len(values), "o", color="C0", alpha=0.7)
        axis.plot([values.mean()], [place], "|", color="C1", markersize=18, markeredgewidth=2)
    axis.set_yticks(range(len(kinds)), kinds)
    axis.set_xlabel(f"{column} (dots: seeds, bar: mean)")
    axis.grid(alpha=0.3, axis="x")
    with writing(path) as part:
        figure.savefig(part, dpi=110, format="png", bbox_inches="tight")
    plt.close(figure)
