"""A claim's picture: a panel for each of its tests."""

import textwrap
from pathlib import Path

from kvlab.claims.base import FAILS, HOLDS, OPEN, Finding
from kvlab.claims.reading import Claim
from kvlab.experiment import store

COLOURS = {HOLDS: "tab:green", FAILS: "tab:red", OPEN: "tab:orange"}
ACROSS = 3  # panels in a row


def draw(claim: Claim, findings: list[Finding], path: Path) -> Path:
    """Writes the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyplot's backend is the caller's
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(findings) // ACROSS)
    columns = min(len(findings), ACROSS)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows + 0.6))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, test, found in zip(axes, claim.tests, findings):
        axis.xaxis.set_major_locator(MaxNLocator(5))
        test.draw(axis, found)
        beside = "" if found.decides else " (beside)"
        title = "\n".join(textwrap.wrap(f"{found.name}{beside}: {found.outcome}", 44))
        axis.set_title(title, fontsize="medium", color=COLOURS[found.outcome])
    for axis in axes[len(findings) :]:
        axis.set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(claim.statement, 48 * columns)))
    figure.tight_layout()
    with store.writing(path) as part:
        figure.savefig(part, dpi=100, format="png", metadata={"Software": None})
    return path
