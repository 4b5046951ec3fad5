"""Every policy of a finished experiment against the full cache, on the same samples: columns for the report.

Samples are paired by model, task, seed, batch and place in it. Answers cluster by context, tokens by document.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from kvlab import parts
from kvlab.attention import PREFILL_BLOCK
from kvlab.evaluate import statistics, verdict
from kvlab.experiment import config, store
from kvlab.experiment.layers import Choice, without_selection

Samples = dict[tuple, dict[str, Any]]  # (group of the cell, batch, sample) → row of the results

REFERENCE = "reference"
UNPAIRED = "no reference"
DIFFERENCE = {  # column → field of a verdict
    "accuracy_difference": "difference",
    "accuracy_difference_low": "low",
    "accuracy_difference_high": "high",
    "minimum_detectable_effect": "minimum_detectable_effect",
    "items_needed": "items_needed",
    "contexts_needed": "clusters_needed",
}


def is_full(cell: config.Cell) -> bool:
    """Whether every layer of the cell has the plain policy, whatever its label, after the usual prefill."""
    plain = parts.policy({})
    if cell.prefill_block != PREFILL_BLOCK:
        return False
    if isinstance(cell.layers, Choice):
        return cell.layers.nowhere and parts.policy(without_selection(cell.policy)) == plain
    tables = [cell.policy, *({**cell.policy, **override.policy} for override in cell.layers)]
    return all(parts.policy(table) == plain for table in tables)


def columns(cells: list[config.Cell], folder: Path, margins: config.Margins) -> dict[str, dict[str, Any]]:
    """Intervals and verdicts by policy label. Verdicts only where the grid has a full cache to compare with."""
    reference: Samples = {}
    for cell in filter(is_full, cells):
        reference |= samples([cell], folder)
    made = {}
    for label in dict.fromkeys(cell.label for cell in cells):
        same = [cell for cell in cells if cell.label == label]
        rows = samples(same, folder)
        full = all(map(is_full, same))
        made[label] = accuracy(rows, reference, full, margins) | likelihood(rows, bool(reference), full, margins)
    return made


def samples(cells: list[config.Cell], folder: Path) -> Samples:
    return {(cell.group, *key): row for cell in cells for key, row in store.Run(folder, cell).rows()}


def clusters(rows: Samples) -> dict[tuple, tuple]:
    """The context of each sample. A seed draws from the same texts whatever a task's length: such contexts are one cluster."""
    return {key: (*drawn(key[0]), row.get("context", key[1])) for key, row in rows.items()}


@functools.cache
def drawn(group: str) -> tuple[str, str, int]:
    """Model, task and seed of a group of cells (`Cell.group`)."""
    model, task, seed = json.loads(group)
    return model["name"], task["name"], seed


def answers(rows: Samples, reference: Samples, margin: float, alpha: float) -> verdict.Verdict | None:
    """On the samples that both have, right or wrong; None where there are none."""
    pairs = answer_pairs(rows, reference)
    return pairs and verdict.binary(*pairs[:2], margin, pairs[2], alpha)


def answer_pairs(rows: Samples, reference: Samples) -> tuple[list, list, list] | None:
    """Right or wrong under the policy, under the reference, and the context; None where there is nothing to pair."""
    both = [key for key, row in rows.items() if key in reference and "correct" in row]
    if not both:
        return None
    mine, theirs = ([table[key]["correct"] for key in both] for table in (rows, reference))
    context = clusters(rows)
    return mine, theirs, [context[key] for key in both]


def tokens(rows: Samples, margin: float, alpha: float) -> verdict.Verdict | None:
    """On the tokens of documents, in nats; None where there are none."""
    pairs = token_pairs(rows)
    return pairs and verdict.continuous(*pairs[:2], margin, pairs[2], alpha)


def token_pairs(rows: Samples) -> tuple[np.ndarray, np.ndarray, list] | None:
    """Nats of each token under the policy, under the full cache, and the document; None where there are none."""
    rows = {key: row for key, row in rows.items() if "nll_reference" in row}
    if not rows:
        return None
    mine, theirs = (np.concatenate([row[name] for row in rows.values()]) for name in ("nll", "nll_reference"))
    return mine, theirs, [row.get("document", key) for key, row in rows.items() for _ in row["nll"]]


def accuracy(rows: Samples, reference: Samples, full: bool, margins: config.Margins) -> dict[str, Any]:
    """Columns of the samples that are right or wrong, in shares; nothing if there are none."""
    rows = {key: row for key, row in rows.items() if "correct" in row}
    if not rows:
        return {}
    context = clusters(rows)
    shares = [row.get("share", row["correct"]) for row in rows.values()]  # of an answer; verdicts are about whole ones
    share = statistics.proportion(shares, list(context.values()), margins.alpha)
    made: dict[str, Any] = {"accuracy_low": share.low, "accuracy_high": share.high}
    if not reference:
        return made
    if full:
        return made | _difference(REFERENCE, dict.fromkeys(DIFFERENCE.values(), 0.0))
    found = answers(rows, reference, margins.accuracy_margin, margins.alpha)
    return made | (_difference(found.outcome, dataclasses.asdict(found)) if found else _difference(UNPAIRED, {}))


def _difference(outcome: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {"verdict": outcome, **{column: figures.get(field, math.nan) for column, field in DIFFERENCE.items()}}


def likelihood(rows: Samples, verdicts: bool, full: bool, margins: config.Margins) -> dict[str, Any]:
    """Columns of the samples scored token by token, in nats; each token carries the full cache's own likelihood."""
    made = tokens(rows, margins.nll_margin, margins.alpha)
    if made is None:
        return {}
    columns: dict[str, Any] = {"delta_nll_low": made.low, "delta_nll_high": made.high}
    if verdicts:
        columns["nll_verdict"] = REFERENCE if full else made.outcome
        columns["nll_minimum_detectable_effect"] = made.minimum_detectable_effect
        columns["documents_needed"] = made.clusters_needed
    return columns
