"""Figures from what groups measured: a row for each case, jax's best beside them, and what was to be reached."""

import numpy as np

from kvlab.bench.kernels import peers
from kvlab.bench.kernels.cases import BASELINE, Case
from kvlab.bench.kernels.group import Group

LONG = 65_536  # tokens from which memory alone should count
REACH = 0.82  # of the copy's bandwidth


def rows(group: Group) -> list[dict]:
    """Milliseconds and GB/s are medians over rounds, `fraction_of_copy` is the median of the rounds' ratios; None: not timed."""
    found = []
    for case in group.cases:
        seconds, copy = (np.array(group.seconds.get(name, ())) for name in (case, "copy"))
        row = {"layout": case.layout, "read": case.read, "dtype": case.dtype, "length": case.length, "batch": case.batch}
        row |= {"ms": None, "gb_s": None, "fraction_of_copy": None}
        if len(seconds):
            row["ms"] = float(np.median(seconds) * group.useful[case] * 1e3)
            row["gb_s"] = float(1 / np.median(seconds) / 1e9)
            row["fraction_of_copy"] = float(np.median(copy[: len(seconds)] / seconds))
        error = group.errors.get(case)
        row["error"] = error if error is not None and np.isfinite(error) else None
        row["tolerance"] = group.setting.tolerance(case.dtype, case.layout in peers.PEERS)
        row["reason"] = group.reasons.get(case, None if case in group.errors else "not run")
        found.append(row)
    return found


def roofs(groups: list[dict[Case | str, list[float]]]) -> dict[str, float | None]:
    """GB/s of the copy (bytes read and written) and of reading alone, medians over all rounds."""
    seconds = {name: np.array([x for found in groups for x in found.get(name, ())]) for name in ("copy", "read")}
    return {f"{name}_gb_s": float(1 / np.median(x) / 1e9) if len(x) else None for name, x in seconds.items()}


def beside_jax(cases: list[dict]) -> list[dict]:
    """By length and batch: the best of jax's own and kvlab's best, over everything in 16-bit numbers."""
    found = []
    for length, batch in sorted({(row["length"], row["batch"]) for row in cases}):
        timed = [row for row in cases if row["ms"] is not None and (row["length"], row["batch"]) == (length, batch)]
        timed = [row for row in timed if row["read"] == "dense" and row["dtype"] == peers.DTYPE]
        theirs = [row for row in timed if row["layout"] in peers.PEERS]
        ours = [row for row in timed if _own(row)]
        if theirs and ours:
            best, own = (min(some, key=lambda row: row["ms"]) for some in (theirs, ours))
            found.append({"length": length, "batch": batch, "best_of_jax": best["layout"], "best_of_jax_ms": best["ms"]})
            found[-1] |= {"layout": own["layout"], "ms": own["ms"], "over_best_of_jax": own["ms"] / best["ms"]}
    return found


def summary(cases: list[dict]) -> dict:
    """`beside_jax`, of it the group where kvlab is worst, and the targets: `met` is None where nothing was measured."""
    groups = beside_jax(cases)
    worst = max(groups, key=lambda row: row["over_best_of_jax"], default={})
    share = _share(cases)
    ratio = worst.get("over_best_of_jax")
    targets = [
        {
            "name": "fraction_of_copy",
            "words": f"reads everything at {REACH} of the copy's bandwidth or more from {LONG:,} tokens on, in the best of "
            "kvlab's layouts, in each kind of numbers and batch",
            "value": share,
            "met": None if share is None else share >= REACH,
        },
        {
            "name": "over_best_of_jax",
            "words": "takes no longer than the best of jax's own over the same tokens in 16-bit numbers, at every length and "
            "batch",
            "value": ratio,
            "met": None if ratio is None else ratio <= 1,
        },
    ]
    return {
        "beside_jax": groups,
        "best_of_jax_ms": worst.get("best_of_jax_ms"),
        "over_best_of_jax": ratio,
        "targets": targets,
    }


def _share(cases: list[dict]) -> float | None:
    """The least, over kinds of numbers, lengths and batches, of what the best layout reaches of the copy."""
    best: dict[tuple, float] = {}
    for row in cases:
        if row["fraction_of_copy"] is not None and row["read"] == "dense" and row["length"] >= LONG and _own(row):
            key = row["dtype"], row["length"], row["batch"]
            best[key] = max(best.get(key, 0.0), row["fraction_of_copy"])
    return min(best.values(), default=None)


def _own(row: dict) -> bool:
    return row["layout"] not in (*peers.PEERS, BASELINE)
