"""What both sides found of a method, as a row with paired intervals; totals over methods; the table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.evaluate import statistics

ROUNDING = 1e-4  # nats a token: what float32 leaves of a likelihood where both sides keep the same tokens
SIDES = ("kvlab", "kvpress")


@dataclasses.dataclass
class Found:
    """One method at a ratio, and whether it saw the questions; the rest is filled in context by context.

    Attributes:
      texts, hits: an answer and whether it is right, per side and question.
      context, prompt: of each question, its context's number and the tokens that were compressed.
      nll: nats of each token, per side; `document` is that of each token.
      seconds: per side, of each context and repetition; prefill is in kvpress's and is not in kvlab's, which shares it.
    """

    method: str
    ratio: float
    question: str
    context: list[int] = dataclasses.field(default_factory=list)
    prompt: list[list[int]] = dataclasses.field(default_factory=list)
    document: list[int] = dataclasses.field(default_factory=list)
    texts: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {side: [] for side in SIDES})
    hits: dict[str, list[bool]] = dataclasses.field(default_factory=lambda: {side: [] for side in SIDES})
    nll: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {side: [] for side in SIDES})
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {side: [] for side in SIDES})

    def differs(self) -> int | None:
        """The first question whose answers differ."""
        both = zip(self.texts["kvlab"], self.texts["kvpress"])
        return next((i for i, (mine, other) in enumerate(both) if mine != other), None)


def row(found: Found) -> dict[str, Any]:
    """Figures of one method; `agree` where no interval excludes that the two are alike, or likelihood differs by `ROUNDING`."""
    hits = statistics.binary_difference(found.hits["kvlab"], found.hits["kvpress"], found.context)
    made: dict[str, Any] = {"method": found.method, "question": found.question, "ratio": found.ratio}
    made |= {f"hits_{side}": sum(found.hits[side]) for side in SIDES} | {"of": len(found.context)}
    made["same_answers"] = sum(a == b for a, b in zip(found.texts["kvlab"], found.texts["kvpress"]))
    made |= {"difference": hits.value, "low": hits.low, "high": hits.high}
    agree = hits.low <= 0 <= hits.high
    if found.document:
        nll = statistics.mean_difference(found.nll["kvlab"], found.nll["kvpress"], found.document)
        made |= {f"nll_{side}": float(np.mean(found.nll[side])) for side in SIDES}
        made |= {"nll_difference": nll.value, "nll_low": nll.low, "nll_high": nll.high}
        agree &= nll.low <= 0 <= nll.high or abs(nll.value) <= ROUNDING
    made |= {"agree": bool(agree), "reason": ""}
    return made | {f"seconds_{side}": total(found.seconds[side], len(set(found.context))) for side in SIDES}


def total(seconds: Sequence[float], contexts: int) -> float:
    """Seconds of so many contexts, which are all of one length: the median's multiple, as others may use the machine."""
    return float(np.median(seconds)) * contexts


def totals(found: list[Found], prefill: list[float]) -> dict[str, float]:
    """Seconds of all methods together on each side; kvlab's one prefill for each context is added to its own."""
    contexts = len(prefill)
    theirs = sum(total(each.seconds["kvpress"], contexts) for each in found)
    shared = total(prefill, contexts)
    ours = shared + sum(total(each.seconds["kvlab"], contexts) for each in found)
    return {"prefill_seconds_kvlab": shared, "seconds_kvlab": ours, "seconds_kvpress": theirs, "ratio": ours / theirs}


COLUMNS = {
    "method": lambda r: r["method"] + (", question known" if r["question"] == "known" else ""),
    "ratio": lambda r: f"{r['ratio']:g}",
    "hits: kvlab, kvpress": lambda r: f"{r['hits_kvlab']}, {r['hits_kvpress']} of {r['of']}",
    "same answers": lambda r: f"{r['same_answers']}",
    "difference": lambda r: f"{r['difference']:+.3f} [{r['low']:+.2f}, {r['high']:+.2f}]",
    "NLL: kvlab, kvpress": lambda r: f"{r['nll_kvlab']:.4f}, {r['nll_kvpress']:.4f}" if "nll_kvlab" in r else "",
    "NLL difference": lambda r: (
        f"{r['nll_difference']:+.1e} [{r['nll_low']:+.1e}, {r['nll_high']:+.1e}]" if "nll_low" in r else ""
    ),
    "seconds: kvlab, kvpress": lambda r: f"{r['seconds_kvlab']:.1f}, {r['seconds_kvpress']:.1f}",
    "agree": lambda r: "yes" if r["agree"] else "no",
    "differs because": lambda r: r["reason"],
}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(show(row) for show in COLUMNS.values())} |" for row in rows]
    return "\n".join([*lines, ""])
