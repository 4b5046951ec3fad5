"""Why a sample failed: where in the cache its answer was lost.

A task says where the answer stands in the prompt (`Batch.spans`); the decode loop says of each of its tokens, by layer, KV
head and step, whether it is still stored and whether the query read it. Only layers that the model itself lets see the whole
prompt count. For each sample:

    kept_share   share of (layer, KV head) that hold every token of the answer when the first query for it is made
    read_share   share of (layer, KV head) whose queries, taken together, read every token of it from then on
    cause        null where the sample is right, else the first of these that holds

    model          the full fp32 cache is wrong as well
    evicted        kept_share < 1/2
    unread         read_share < 1/2
    misquantised   both are 1 and a codec rounds: the answer is there in every head, and read, but its numbers are not those
    unclear        none of these: some heads lost it, or what was lost stood elsewhere, such as the words around it
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.codec import Raw
from kvlab.experiment import config, store
from kvlab.loop import Steps
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.reading import GONE, READ
from kvlab.session import padded
from kvlab.tasks import Batch

CAUSES = ("model", "evicted", "unread", "misquantised", "unclear")
COLUMNS = ("kept_share", "read_share")
MOST = 0.5  # of the heads: below it the answer counts as lost


class Followed:
    """Collects, step by step, what became of the answers' tokens; of a batch without spans nothing.

    Attributes:
      positions: of the tokens that are followed, `[B, W]`, −1 where an answer has fewer; None without spans.
    """

    def __init__(self, model: ModelConfig, batch: Batch):
        tokens = [[t for ends in zip(span[::2], span[1::2]) for t in range(*ends)] for span in batch.spans]
        self.positions = padded(tokens, max(map(len, tokens)), -1) if tokens else None
        self._rows = len(batch.rows)
        self._wide = [layer for layer in range(model.layers) if model.window(layer) is None]
        self._first = [max(len(ids) - 1, 0) for ids in batch.forced]  # the step that makes the answer's first token
        self._kept: dict[int, np.ndarray] = {}
        self._read: dict[int, np.ndarray] = {}

    def see(self, step: int, steps: Steps) -> None:
        """After step number `step`, which was run alone and with `positions` followed."""
        if self.positions is None:
            return
        found = np.asarray(steps.followed[0])[self._wide]
        for row, first in enumerate(self._first):
            mine = found[:, row][..., self.positions[row] >= 0]
            if step == first:
                self._kept[row], self._read[row] = mine != GONE, mine == READ
            elif step > first:
                self._read[row] |= mine == READ

    def rows(self) -> list[dict[str, float]]:
        """For each row of the session the `COLUMNS`; empty where nothing was followed."""
        if self.positions is None:
            return [{} for _ in range(self._rows)]
        share = lambda held: float(held.all(-1).mean())
        return [{"kept_share": share(self._kept[i]), "read_share": share(self._read[i])} for i in range(len(self._first))]


def rounds(policies: Sequence[Policy]) -> bool:
    """Whether a layer stores anything but plain fp32 numbers."""
    return any(side != Raw() for policy in policies for side in (policy.codec.keys, policy.codec.values))


def cause(row: dict[str, Any], model: bool, rounded: bool) -> str | None:
    """Why a sample is wrong, None if it is right. `model`: the full cache is wrong too; `rounded`: see `rounds`."""
    if row["correct"]:
        return None
    kept, read = row["kept_share"], row["read_share"]
    whole = kept == read == 1
    holds = (model, kept < MOST, read < MOST, whole and rounded, True)
    return CAUSES[holds.index(True)]


def table(cells: list[config.Cell], folder: Path) -> dict[str, dict[str, int]]:
    """For each policy label the number of samples by cause; nothing where no task has spans."""
    counts: dict[str, dict[str, int]] = {}
    for cell in cells:
        rows = [row for batch in store.Run(folder, cell).batches() for row in batch["rows"] if "cause" in row]
        if rows:
            mine = counts.setdefault(cell.label, {"samples": 0, **dict.fromkeys(CAUSES, 0)})
            mine["samples"] += len(rows)
            for name in CAUSES:
                mine[name] += sum(row["cause"] == name for row in rows)
    return counts
