"""The roofline: what reading reaches by length, with the copy as the roof."""

from pathlib import Path

from kvlab.bench.kernels import peers
from kvlab.bench.kernels.setting import DTYPES, READS


def draw(figures: dict, path: Path) -> None:
    """A panel for each read and kind of numbers, a line for each layout, dashed for the larger batch; as PNG."""
    from kvlab.experiment import store

    with store.writing(path) as part:
        figure(figures).savefig(part, dpi=140, format="png", bbox_inches="tight")


def figure(figures: dict):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in figures["cases"] if row["gb_s"] is not None]
    made = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(made)
    batches = sorted({row["batch"] for row in timed})
    names = list(dict.fromkeys(row["layout"] for row in timed))
    for axis, (read, dtype) in zip(made.subplots(2, 2, sharex=True).flat, [(r, d) for r in READS for d in DTYPES]):
        here = [row for row in timed if (row["read"], row["dtype"]) == (read, dtype)]
        for i, name in enumerate(names):
            for j, batch in enumerate(batches):
                line = sorted((x["length"], x["gb_s"]) for x in here if (x["layout"], x["batch"]) == (name, batch))
                if line:
                    mark = "x" if name in peers.PEERS else "o"
                    look = {"color": f"C{i}", "ls": ("-", "--")[j % 2], "marker": mark, "ms": 4}
                    axis.plot(*zip(*line), label=f"{name}, batch {batch}", **look)
        if figures["copy_gb_s"]:
            axis.axhline(figures["copy_gb_s"], color="black", lw=1, label="copy")
        axis.set(xscale="log", ylim=0, title=f"{read}, {dtype}", xlabel="tokens", ylabel="useful GB/s")
        axis.grid(alpha=0.3)
        if here:
            axis.legend(fontsize=6, ncols=2)
    return made
