"""The page's pictures: bytes against quality, and figures by layer. Each is drawn twice.

On the page it is SVG in the page's own ink and fonts, so that it follows light and dark; beside the page lies a PNG.
"""

import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.experiment import picture, store
from kvlab.report.layers import Series

INK = "#010203"  # stands for the page's own colour of text, and occurs nowhere else
ROLES: Any = (
    "text.color",
    "axes.edgecolor",
    "axes.labelcolor",
    "xtick.color",
    "ytick.color",
    "xtick.labelcolor",
    "ytick.labelcolor",
)
PLAIN: Any = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}
LINES = ("-", "--", ":", "-.")


def bytes_against_quality(frame, png: Path) -> str | None:
    """The experiment's own picture (`kvlab.experiment.picture`), with rings; None where there is nothing to draw."""
    return _both(lambda ink: picture.figure(frame, fronts=True), png, "bytes")


def by_layer(panels: dict[str, Series], full: list[str], png: Path) -> str | None:
    """A panel for each heading: a line for each policy, the full cache's in ink. None without figures."""
    shown = {heading: series for heading, series in panels.items() if series}
    return _both(lambda ink: _layers(shown, full, ink), png, "layers") if shown else None


def _layers(panels: dict[str, Series], full: list[str], ink: str):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(panels), 4.2))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    labels = list(dict.fromkeys(label for series in panels.values() for label in series))
    styles = _styles(labels, full, ink)
    for place, (heading, series) in zip(axes, panels.items()):
        for label, layers in series.items():
            place.plot(range(len(layers)), layers, label=label, **styles[label])
        place.set_xlabel("layer")
        place.set_ylabel(heading)
        place.set_ylim(bottom=0)
        place.xaxis.get_major_locator().set_params(integer=True)
        place.grid(alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    columns = -(-len(names) // picture.LEGEND)
    picture.legend(
        axes[-1], handles, names, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, ncols=columns, fontsize="small"
    )
    figure.tight_layout()
    return figure


def _styles(labels: list[str], full: list[str], ink: str) -> dict[str, dict]:
    """The colours of the other picture; budgets of a method differ by the line, and the full cache is in ink."""
    looks, lines = picture.looks(labels), {name: itertools.cycle(LINES) for name in map(picture.method, labels)}
    made = {}
    for label in labels:
        mark, colour = looks[picture.method(label)]
        plain = any(label == name or label.endswith(f": {name}") for name in full)
        how = {"color": ink, "lw": 2.4, "zorder": 5} if plain else {"color": colour, "lw": 1.4}
        made[label] = {**how, "ls": next(lines[picture.method(label)]), "marker": "" if plain else mark, "ms": 3.5}
    return made


def _both(make: Callable, png: Path, salt: str) -> str | None:
    from matplotlib import rc_context

    with rc_context(PLAIN):
        figure = make("black")
        if figure is None:
            return None
        with store.writing(png) as part:
            figure.savefig(part, dpi=140, format="png", bbox_inches="tight")
    with rc_context({**PLAIN, **dict.fromkeys(ROLES, INK), "svg.fonttype": "none", "svg.hashsalt": salt}):
        text = io.StringIO()
        make(INK).savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    return inline(text.getvalue(), salt)


def inline(svg: str, name: str) -> str:
    """An SVG file as an element of a page: without prologue and metadata, in the page's ink, with ids of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)
    return svg.replace(INK, "currentColor")
