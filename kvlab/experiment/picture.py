"""Bytes against quality: a panel for accuracy and one for KL, whichever were measured."""

import itertools
import re
from pathlib import Path

import numpy as np

from kvlab.experiment import store

PANELS = {"accuracy": "accuracy (higher is better)", "kl_mean": "mean KL from the full cache, nats (lower is better)"}
AXES = {"resident_bytes": "resident bytes per sequence, MB", "read_bytes": "bytes that a step reads per sequence, MB"}
ALIKE = 0.9  # resident bytes above this share of the most do not set policies apart: index keys take a few in a hundred
MARKS = "osD^vP*Xhd"
LEGEND = 26  # names in a column of the legend


def axis(frame) -> str:
    """The bytes that set the policies of a frame apart: those that are resident, or where these are alike those read."""
    spread = lambda column: frame[column].min() / frame[column].max()
    alike = "read_bytes" in frame and spread("resident_bytes") > ALIKE and spread("read_bytes") < spread("resident_bytes")
    return "read_bytes" if alike else "resident_bytes"


def method(label: str) -> str:
    """A policy's label without the budget that it ends on: "snapkv, 25 %" is snapkv."""
    return re.sub(r"[\s,]*\d+(\.\d+)?\s*%$", "", label) or label


def front(frame, column: str) -> list[str]:
    """Policies that no other beats: none has as few bytes and is as good in `column`, and better in one of the two."""
    better = 1 if column == "accuracy" else -1
    known = frame[frame[column].notna()]
    points = list(zip(known["policy"], known[axis(frame)], better * known[column]))
    beaten = lambda b, q: any(x <= b and y >= q and (x, y) != (b, q) for _, x, y in points)
    return [label for label, b, q in points if not beaten(b, q)]


def looks(labels) -> dict[str, tuple[str, tuple[float, ...]]]:
    """A mark and a colour for each method among the labels."""
    from matplotlib import colormaps

    # marks and colours come round after different numbers, so that no two of the first hundred methods look alike
    pairs = zip(itertools.cycle(MARKS), itertools.cycle(colormaps["tab20"].colors[:19]))  # type: ignore[attr-defined]
    return dict(zip(dict.fromkeys(map(method, labels)), pairs))


def draw(frame, path: Path) -> Path | None:
    """Writes the picture (see `figure`). None where there is nothing to draw."""
    made = figure(frame)
    if made is None:
        return None
    with store.writing(path) as part:
        made.savefig(part, dpi=110, format="png", bbox_inches="tight")
    return path


def figure(frame, fronts: bool = False):
    """One mark for each method, and a line through its budgets; None where there is nothing to draw.

    `fronts` marks the policies that no other beats with a ring.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyplot's backend is the caller's: a notebook shows its own
    from matplotlib.figure import Figure

    panels = [column for column in PANELS if column in frame]
    if not panels:
        return None
    figure = Figure(figsize=(6.2 * len(panels), 4.6))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for place, column in zip(axes[0], panels):
        _panel(place, frame, column)
        if fronts:
            _rings(place, frame, column)
    if "kl_mean" in panels:
        axes[0][-1].set_yscale("symlog", linthresh=1e-4)
        axes[0][-1].set_ylim(-2e-5, max(3 * frame["kl_mean"].max(), 1e-3))
    names = frame["policy"].map(method).nunique()
    columns = -(-names // LEGEND)
    legend(axes[0][-1], loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, ncols=columns, fontsize="small")
    figure.tight_layout()
    return figure


def legend(place, *args, **how) -> None:
    """Of labels as they are: a dollar sign starts no formula."""
    for text in place.legend(*args, **how).get_texts():
        text.set_parse_math(False)


def _panel(place, frame, column: str) -> None:
    """One panel: every method's points from few bytes to many, with their intervals."""
    across = axis(frame)
    seen = looks(frame["policy"])
    for name, rows in frame.groupby(frame["policy"].map(method), sort=False):
        mark, colour = seen[name]
        rows = rows.sort_values(across)
        x, y = rows[across] / 1e6, rows[column]
        if f"{column}_low" in rows:
            ends = np.maximum([y - rows[f"{column}_low"], rows[f"{column}_high"] - y], 0)
            place.errorbar(x, y, ends, fmt="none", color="0.75", capsize=2, zorder=1)
        place.plot(x, y, color=colour, lw=1, zorder=2)
        place.scatter(x, y, s=55, marker=mark, color=colour, label=name, zorder=3)
    place.set_xlabel(AXES[across])
    place.set_ylabel(PANELS[column])
    place.set_xlim(0, 1.08 * frame[across].max() / 1e6)
    place.grid(alpha=0.3)


def _rings(place, frame, column: str) -> None:
    best = frame[frame["policy"].isin(front(frame, column))]
    ink = place.xaxis.label.get_color()
    place.scatter(best[axis(frame)] / 1e6, best[column], s=150, facecolors="none", edgecolors=ink, linewidths=1.2, zorder=4)
