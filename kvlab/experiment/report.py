"""What a run shows when it is done: a table, a picture, and the frame behind them."""

from pathlib import Path
from typing import Any

from kvlab.experiment import config, store

TIME_COLUMNS = ("tokens_per_s", "ms_per_token_p50", "ms_per_token_p99", "time_to_first_token")

# what the table shows: column → heading, format
SHOWN = {
    "accuracy": ("accuracy", "{:.3f}"),
    "kl_mean": ("KL mean", "{:.4f}"),
    "kl_99": ("KL 99 %", "{:.3f}"),
    "same_top1": ("same top-1", "{:.3f}"),
    "delta_nll": ("ΔNLL", "{:+.4f}"),
    "resident_bytes": ("resident MB", "{:.1f}"),
    "nominal_ratio": ("nominal", "{:.3f}"),
    "logical_ratio": ("logical", "{:.3f}"),
    "resident_ratio": ("resident", "{:.3f}"),
    "tokens_per_s": ("tok/s", "{:.1f}"),
    "ms_per_token_p50": ("p50 ms", "{:.1f}"),
    "ms_per_token_p99": ("p99 ms", "{:.1f}"),
    "time_to_first_token": ("first token s", "{:.2f}"),
}


def progress():
    """A progress bar with the time left, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=Console(stderr=True))


def finish(name: str, experiment: config.Experiment, cells: list[config.Cell], folder: Path):
    """Writes table.parquet and the picture, prints the table, returns the frame with a row per policy."""
    import pandas as pd

    table = pd.DataFrame([store.read_json(folder / cell.run_id / "summary.json") for cell in cells])
    with store.writing(folder / "table.parquet") as part:
        table.to_parquet(part)
    frame = by_policy(table)
    picture = draw(frame, folder / f"{name}.png")
    show(experiment, frame, [folder / "table.parquet", *([picture] if picture else [])])
    return frame


def by_policy(table):
    """One row per policy: the mean over seeds and tasks of every figure that a task gives."""
    figures = table.select_dtypes("number").columns.difference(["seed"])
    order = table["policy"].drop_duplicates()
    frame = table.groupby("policy", sort=False)[list(figures)].mean().loc[order].reset_index()
    # speed and memory of the task that answers questions, where there is one: tasks differ in batch and length
    first = table.groupby("policy", sort=False).first()
    for column in [*TIME_COLUMNS, "resident_bytes", "full_bytes", "nominal_ratio", "logical_ratio", "resident_ratio"]:
        if column in first:
            frame[column] = first.loc[order, column].to_numpy()
    counts = table.groupby("policy", sort=False)["samples"].sum()
    frame["samples"] = counts.loc[order].to_numpy()
    shown = [c for c in SHOWN if c in frame]
    return frame[["policy", *shown, *[c for c in frame if c not in shown and c != "policy"]]]


def show(experiment: config.Experiment, frame, files: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=experiment.question, caption="bytes are per sequence, all layers; ratios are to the full fp32 cache")
    columns = [c for c in SHOWN if c in frame]
    table.add_column("policy", min_width=16)
    for column in columns:
        table.add_column(SHOWN[column][0], justify="right")
    scaled = frame.assign(resident_bytes=frame["resident_bytes"] / 1e6)
    for _, row in scaled.iterrows():
        table.add_row(row["policy"], *(SHOWN[c][1].format(row[c]) for c in columns))
    console = Console(width=None if Console().is_terminal else 180)
    console.print(table)
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True)


def draw(frame, path: Path) -> Path | None:
    """Bytes against quality: a panel for accuracy and one for KL, whichever were measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [c for c in ("accuracy", "kl_mean") if c in frame]
    if not panels:
        return None
    labels = {"accuracy": "accuracy (higher is better)", "kl_mean": "mean KL from the full cache, nats (lower is better)"}
    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.6), squeeze=False)
    for axis, column in zip(axes[0], panels):
        for i, row in frame.iterrows():
            axis.scatter(
                row["resident_bytes"] / 1e6, row[column], s=90, marker="osD^vP*Xhd"[i % 10], label=row["policy"], zorder=3
            )
        axis.set_xlabel("resident bytes per sequence, MB")
        axis.set_ylabel(labels[column])
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    if "kl_mean" in panels:
        axes[0][-1].set_yscale("symlog", linthresh=1e-4)
        axes[0][-1].set_ylim(-2e-5, max(3 * frame["kl_mean"].max(), 1e-3))
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.tight_layout()
    with store.writing(path) as part:
        figure.savefig(part, dpi=110, format="png", bbox_inches="tight")
    plt.close(figure)
    return path


def as_json(frame) -> dict[str, Any]:
    """The frame as one object, policies by label, under the frame's own column names; what was not measured is null."""
    plain = lambda v: None if v != v else v.item() if hasattr(v, "item") else v
    rows = frame.to_dict(orient="records")
    return {"policies": {row.pop("policy"): {k: plain(v) for k, v in row.items()} for row in rows}}
