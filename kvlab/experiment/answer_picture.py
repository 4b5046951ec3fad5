"""What a search found, as a picture: value against loss, with the margin."""

from pathlib import Path

from kvlab.evaluate.sequential import FAIL, FUTILE, OPEN, PASS
from kvlab.experiment import store
from kvlab.experiment.answer import losses
from kvlab.experiment.points import ANSWERS
from kvlab.experiment.search import Found

COLOURS = {PASS: "tab:green", FAIL: "tab:red", FUTILE: "tab:orange", OPEN: "tab:gray"}
AXES = {ANSWERS: "answers lost, points", "likelihood": "likelihood lost, nats a token"}


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
    """Numbers stand where they are, anything else in the order of the file."""
    values = found.search.values
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    across = values if numeric else list(range(len(values)))
    for state, colour in COLOURS.items():
        shown = [(across[i], *losses(kind, each.seen[kind])) for i, each in found.visited.items() if each.state == state]
        if shown:
            x, y, low, high = zip(*shown)
            ends = [[b - a for a, b in zip(low, y)], [b - a for a, b in zip(y, high)]]
            place.errorbar(x, y, ends, fmt="o", color=colour, capsize=3, label=state)
    margin = found.margins.accuracy_margin * 100 if kind == ANSWERS else found.margins.nll_margin
    place.axhline(margin, color="black", ls="--", lw=1, label="margin")
    place.axhline(0, color="0.8", lw=1, zorder=0)
    place.set_xlabel(found.search.path)
    place.set_ylabel(AXES[kind])
    place.set_xticks(across, [name.partition(" ")[2] for name in found.names])
    reach = [abs(x) for each in found.visited.values() for x in losses(kind, each.seen[kind])[:1]]
    top = 1.5 * max([margin, *reach])
    place.set_ylim(-top / 2, top)
    place.legend(frameon=False, fontsize="small")
