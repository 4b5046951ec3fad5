"""Raw samples beside the full cache's: who lost an answer, who gained one."""

import dataclasses
from typing import Any

from kvlab.experiment.compare import Samples
from kvlab.report.data import Results, seed_words, task_words

MOST = 1000  # rows of the page, shared among the policies
EACH = 60
TEXT = 400  # characters of an answer
LOST, GAINED, SAME = "lost", "gained", "same"
FIGURES = ("answer", "target", "cause", "question", "document", "correct")  # columns that name no sample


@dataclasses.dataclass(frozen=True)
class Sample:
    """One row: `full` is the full cache's answer, `kind` what became of it (lost, gained or same); None where nobody knows."""

    where: str
    question: str
    expected: str
    answer: str
    right: bool | None
    full: str | None
    kind: str
    cause: str


@dataclasses.dataclass(frozen=True)
class Shown:
    """A policy's samples: how many there are of each kind, and those that the page shows."""

    label: str
    counts: dict[str, int]
    rows: list[Sample]


def shown(results: Results) -> list[Shown]:
    """Of every policy but the full cache (of that alone where there is no other) lost answers first, then gained, then others."""
    tasks, seeds = task_words(results.cells), seed_words(results.cells)
    tasks = {group: words + seeds[group] for group, words in tasks.items()}
    full = results.full
    labels = [label for label in results.rows if label not in full] or full
    sampled = lambda label: [_sample(k, row, results.reference, tasks) for k, row in _answered(results.rows[label])]
    some = [(label, rows) for label in labels if (rows := sampled(label))]
    each = max(6, min(EACH, MOST // max(len(some), 1)))
    return [Shown(label, _counts(rows), _pick(rows, each)) for label, rows in some]


def _answered(rows: Samples):
    return [(key, row) for key, row in rows.items() if "answer" in row]


def _counts(rows: list[Sample]) -> dict[str, int]:
    return {"all": len(rows), **{kind: sum(row.kind == kind for row in rows) for kind in (LOST, GAINED)}}


def _pick(rows: list[Sample], most: int) -> list[Sample]:
    """Half of the room goes to lost answers, a quarter to gained ones, what is left over to the others, then to any."""
    of = lambda *kinds: [row for row in rows if row.kind in kinds]
    lost, gained, same = of(LOST), of(GAINED), of(SAME)
    first = [*lost[: most // 2], *gained[: most // 4], *same[: most // 4]]
    more = [*lost[most // 2 :], *gained[most // 4 :], *same[most // 4 :]][: most - len(first)]
    order = {LOST: 0, GAINED: 1, SAME: 2}
    return sorted([*first, *more], key=lambda row: order[row.kind])


def _sample(key: tuple, row: dict[str, Any], reference: Samples, tasks: dict[str, str]) -> Sample:
    group, batch, _ = key
    full = reference.get(key)
    depth = f", depth {row['depth']:.2f}" if "depth" in row else ""
    return Sample(
        f"{tasks[group]}{depth}, batch {batch}",
        _question(row),
        _short(row.get("target", "")),
        _short(row["answer"]),
        row.get("correct"),
        _short(full["answer"]) if full else None,
        _kind(row, full),
        row.get("cause") or "",
    )


def _kind(row: dict[str, Any], full: dict[str, Any] | None) -> str:
    """Without the full cache's row its cause still says whether the full cache was right."""
    right = row.get("correct")
    was = full.get("correct") if full else (row["cause"] != "model" if row.get("cause") else right)
    return LOST if was and right is False else GAINED if right and was is False else SAME


def _question(row: dict[str, Any]) -> str:
    """The question as it was fed, or else the facts that tell this sample from its neighbours."""
    if row.get("question"):
        return _short(row["question"].strip())
    return _short(", ".join(f"{name} {value}" for name, value in row.items() if isinstance(value, str) and name not in FIGURES))


def _short(text: Any) -> str:
    text = str(text).strip(" ").replace("\n", "⏎")
    return text if len(text) <= TEXT else text[:TEXT] + " …"
