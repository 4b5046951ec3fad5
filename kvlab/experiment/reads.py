"""What the decode steps of a batch read: bytes, realised sparsity and active bounds, one set of figures per sample."""

from collections.abc import Iterable

import numpy as np

from kvlab import memory, parts
from kvlab.core import BY_MAXIMUM, BY_SHARE
from kvlab.decode import Session
from kvlab.loop import Steps

WATCH = ("reads", "bound")
COLUMNS = ("read_bytes", "read_ratio", "read_ratio_gated", "realised_sparsity", "by_share", "by_maximum")
FULL = parts.policy({})


class Reads:
    """Collects `Steps.reads` and `Steps.bound` at chosen steps of a session; what it asks the device for is small."""

    def __init__(self, session: Session, steps: Iterable[int]):
        self.session, self.steps = session, frozenset(int(i) for i in steps)
        self.reads: list[np.ndarray] = []  # each [L, B, H], tokens
        self.bound: list[np.ndarray] = []
        self.stored: list[np.ndarray] = []
        self.length: list[np.ndarray] = []  # each [B], tokens fed so far

    def see(self, step: int, steps: Steps) -> None:
        """After step number `step`, which was run alone with `WATCH` watched."""
        if step in self.steps:
            self.reads.append(np.asarray(steps.reads[0]))
            self.bound.append(np.asarray(steps.bound[0]))
            self.stored.append(np.asarray(memory.stored(self.session.state.caches)))
            self.length.append(self.session.lengths.copy())  # the array itself is lent to the next step

    def rows(self) -> list[dict[str, float]]:
        """For each row of the session the `COLUMNS`, averaged over the steps that were seen.

          read_bytes: of one step, over all layers and heads (see `memory.read_bytes`)
          read_ratio: those over what the full fp32 cache of the same length would read
          read_ratio_gated: the same over the layers whose selection leaves something out
          realised_sparsity: share of the stored tokens that those layers do not read
          by_share, by_maximum: share of (step, layer, head) of those layers in which that bound was active

        The last four are missing where every layer reads all.
        """
        read, full = self._bytes()
        gated = [i for i, policy in enumerate(self.session.policies) if not policy.selection.reads_all]
        made = {"read_bytes": read.sum(1).mean(0), "read_ratio": read.sum(1).mean(0) / full.sum(1).mean(0)}
        if gated:
            reads, kept, bound = (np.stack(x)[:, gated] for x in (self.reads, self.stored, self.bound))
            made |= {
                "read_ratio_gated": read[:, gated].sum(1).mean(0) / full[:, gated].sum(1).mean(0),
                "realised_sparsity": 1 - reads.sum((0, 1, 3)) / kept.sum((0, 1, 3)),
                "by_share": (bound == BY_SHARE).mean((0, 1, 3)),
                "by_maximum": (bound == BY_MAXIMUM).mean((0, 1, 3)),
            }
        return [{name: float(x[row]) for name, x in made.items()} for row in range(read.shape[-1])]

    def _bytes(self):
        """Bytes read by each layer and by the full cache's, both `[steps, L, B]`."""
        dim = self.session.model.config.head_dim
        layers = enumerate(self.session.policies)
        reads, kept = np.stack(self.reads), np.stack(self.stored)
        mine = np.stack([memory.read_bytes(policy, dim, reads[:, i], kept[:, i]) for i, policy in layers], 1).sum(-1)
        full = memory.full_read_bytes(FULL, dim, np.stack(self.length)) * reads.shape[-1]
        return mine, np.broadcast_to(full[:, None], mine.shape)


def planned(new_tokens: int, most: int) -> np.ndarray:
    """Up to `most` steps of `new_tokens`, evenly spaced, first and last among them."""
    return np.unique(np.linspace(0, new_tokens - 1, most).round().astype(int))
