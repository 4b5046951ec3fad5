"""What both sides found of a method, as a row with paired intervals; totals over methods; the table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.evaluate import logits as statistics
from kvlab.evaluate.statistics import binary_difference, mean_difference

ROUNDING = 1e-4  # nats a token: what float32 leaves of a likelihood where both sides keep the same tokens
SIDES = ("kvlab", "kvpress")


def _by_side() -> Any:
    return dataclasses.field(default_factory=lambda: {side: [] for side in SIDES})


@dataclasses.dataclass
class Likelihoods:
    """Nats of each token on both sides, and the number of the context or document that it belongs to."""

    nll: dict[str, list[float]] = _by_side()
    cluster: list[int] = dataclasses.field(default_factory=list)

    def add(self, kvlab: np.ndarray, kvpress: np.ndarray, cluster: int) -> None:
        self.nll["kvlab"] += kvlab.tolist()
        self.nll["kvpress"] += kvpress.tolist()
        self.cluster += [cluster] * len(kvlab)


@dataclasses.dataclass
class Found:
    """One method at a ratio, and whether it saw the questions; the rest is filled in context by context.

    Attributes:
      texts, hits: an answer and whether it is right, per side and question.
      context, prompt: of each question, its context's number and the tokens that were compressed.
      turn: of each question, the tokens fed after them: itself and the right answer, but for its last token.
      right: likelihood of the right answers; `text` of documents that go on.
      seconds: per side, of each context and repetition; prefill is in kvpress's and is not in kvlab's, which shares it.
    """

    method: str
    ratio: float
    question: str
    context: list[int] = dataclasses.field(default_factory=list)
    prompt: list[list[int]] = dataclasses.field(default_factory=list)
    turn: list[list[int]] = dataclasses.field(default_factory=list)
    texts: dict[str, list[str]] = _by_side()
    hits: dict[str, list[bool]] = _by_side()
    seconds: dict[str, list[float]] = _by_side()
    right: Likelihoods = dataclasses.field(default_factory=Likelihoods)
    text: Likelihoods = dataclasses.field(default_factory=Likelihoods)

    def differs(self) -> int | None:
        """The first question whose answers differ."""
        both = zip(self.texts["kvlab"], self.texts["kvpress"])
        return next((i for i, (mine, other) in enumerate(both) if mine != other), None)


def nll(logits_TV, targets: Sequence[int]) -> np.ndarray:
    """Nats of each target; `logits` are those that predict them."""
    return -statistics.log_softmax(logits_TV)[np.arange(len(targets)), list(targets)].astype(np.float64)


def row(found: Found) -> dict[str, Any]:
    """Figures of one method; `agree` where no interval excludes that the two are alike, or likelihood differs by `ROUNDING`."""
    hits = binary_difference(found.hits["kvlab"], found.hits["kvpress"], found.context)
    made: dict[str, Any] = {"method": found.method, "question": found.question, "ratio": found.ratio}
    made |= {f"hits_{side}": sum(found.hits[side]) for side in SIDES} | {"of": len(found.context)}
    made["same_answers"] = sum(a == b for a, b in zip(found.texts["kvlab"], found.texts["kvpress"]))
    made |= {"difference": hits.value, "low": hits.low, "high": hits.high}
    agree = hits.low <= 0 <= hits.high
    for name, seen in (("answer_nll", found.right), ("nll", found.text)):
        if seen.cluster:
            apart = mean_difference(seen.nll["kvlab"], seen.nll["kvpress"], seen.cluster)
            made |= {f"{name}_{side}": float(np.mean(seen.nll[side])) for side in SIDES}
            if apart.clusters > 1:  # or there is no interval
                made |= {f"{name}_low": apart.low, f"{name}_high": apart.high}
            made |= {f"{name}_difference": apart.value}
            agree &= abs(apart.value) <= ROUNDING or apart.clusters > 1 and apart.low <= 0 <= apart.high
    made |= {"agree": bool(agree), "explained": ""}
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
    return {"prefill_seconds_kvlab": shared, "seconds_kvlab": ours, "seconds_kvpress": theirs, "time_ratio": ours / theirs}


def _apart(name: str):
    """A column with a likelihood on both sides and the paired difference; empty where it was not measured."""

    def show(r: dict[str, Any]) -> str:
        if f"{name}_difference" not in r:
            return ""
        ends = f" [{r[f'{name}_low']:+.1e}, {r[f'{name}_high']:+.1e}]" if f"{name}_low" in r else ""
        apart = f"{r[f'{name}_difference']:+.1e}{ends}"
        return f"{r[f'{name}_kvlab']:.4f}, {r[f'{name}_kvpress']:.4f}: {apart}"

    return show


COLUMNS = {
    "method": lambda r: r["method"] + (", question known" if r["question"] == "known" else ""),
    "ratio": lambda r: f"{r['ratio']:g}",
    "hits: kvlab, kvpress": lambda r: f"{r['hits_kvlab']}, {r['hits_kvpress']} of {r['of']}",
    "same answers": lambda r: f"{r['same_answers']}",
    "difference": lambda r: f"{r['difference']:+.3f} [{r['low']:+.2f}, {r['high']:+.2f}]",
    "NLL of right answers: kvlab, kvpress": _apart("answer_nll"),
    "NLL of text: kvlab, kvpress": _apart("nll"),
    "seconds: kvlab, kvpress": lambda r: f"{r['seconds_kvlab']:.1f}, {r['seconds_kvpress']:.1f}",
    "agree": lambda r: "yes" if r["agree"] else "no",
    "differs because": lambda r: r["explained"],
}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(show(row) for show in COLUMNS.values())} |" for row in rows]
    return "\n".join([*lines, ""])
