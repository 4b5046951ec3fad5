"""What a search found, as a picture: value against loss, with the margin."""

from pathlib import Path

import numpy as np

from kvlab.evaluate.sequential import FAIL, FUTILE, OPEN, PASS
from kvlab.experiment import store
from kvlab.experiment.search.answer import losses
from kvlab.experiment.search.points import ANSWERS
from kvlab.experiment.search.search import Found

COLOURS = {PASS: "tab:green", FAIL: "tab:red", FUTILE: "tab:orange", OPEN: "tab:gray"}
AXES = {ANSWERS: "answers lost, points", "likelihood": "likelihood lost, nats a token"}
FAR = 1e6  # where an interval that has no end is cut


def draw(found: Found, path: Path) -> None:
    """Each visited value's loss with its interval, and the margin; a panel for each measure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(next(iter(found.visited.values())).seen)
    figure = Figure(figsize=(5.6 * len(kinds), 4.2))
    FigureCanvasAgg(figure)
    for place, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds):
        _panel(place, found, kind)
    figure.tight_layout()
    with store.writing(path) as part:
        figure.savefig(part, dpi=110, format="png", bbox_inches="tight")


def _panel(place, found: Found, kind: str) -> None:
    """Values stand at equal distances, since those worth asking for crowd at one end."""
    for state, colour in COLOURS.items():
        shown = [(i, *losses(kind, each.seen[kind])) for i, each in found.visited.items() if each.state == state]
        if shown:
            x, y, low, high = zip(*shown)
            ends = np.clip([np.subtract(y, low), np.subtract(high, y)], 0, FAR)
            place.errorbar(x, y, ends, fmt="o", color=colour, capsize=3, label=state)
    margin = found.margins.accuracy_margin * 100 if kind == ANSWERS else found.margins.nll_margin
    place.axhline(margin, color="black", ls="--", lw=1, label="margin")
    place.axhline(0, color="0.8", lw=1, zorder=0)
    place.set_xlabel(found.search.path)
    place.set_ylabel(AXES[kind])
    names = [name.partition(" ")[2] for name in found.names]
    place.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) < 6 else 30)
    place.set_xlim(-0.5, len(names) - 0.5)
    reach = [abs(x) for each in found.visited.values() for x in losses(kind, each.seen[kind])[:1]]
    top = 1.5 * max([margin, *reach])
    place.set_ylim(-top / 2, top)
    place.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize="small")
