"""What is right: attention in float64 on the host, over the numbers that a codec stored."""

import numpy as np

from kvlab.bench.kernels.cases import CODECS, Case, Ready
from kvlab.core import EMPTY, PAGE, Record


class Exact:
    """Errors against the exact outputs over one record; what was stored is worked out once for each kind of numbers."""

    def __init__(self, record: Record):
        self.record = record
        self.known: dict[tuple[str, int, int], list[np.ndarray]] = {}

    def error(self, case: Case, made: Ready, query, pages, out) -> float:
        """The largest error of the first row's first head and the last row's last, over the largest exact number.

        `query` and `out` are `[B, H, G, D]` and `pages` the list `[B, H, R]` that was read, or None. The layout has no part in
        this: a token's numbers are taken from the record by its position.
        """
        B, H, _, D = query.shape
        worst = 0.0
        for b, h in ((0, 0), (B - 1, H - 1)):
            pos = made.visible(b, h)
            if pages is not None:
                pos = pos.reshape(-1, PAGE)[np.asarray(pages)[b, h]].reshape(-1)
            pos = pos[pos != EMPTY]
            key, value = (x[pos] for x in self.stored(case.dtype, b, h))
            want = attention(np.asarray(query[b, h], np.float64) * D**-0.5, key, value)
            got = np.asarray(out[b, h], np.float64)
            found = np.abs(got - want).max() / (np.abs(want).max() or 1.0)
            worst = max(worst, float(found)) if np.isfinite(got).all() else np.inf
        return worst

    def stored(self, dtype: str, row: int, head: int) -> list[np.ndarray]:
        """A head's keys and values `[T, D]` as a codec stored them, in float64."""
        if (dtype, row, head) not in self.known:
            codec = CODECS[dtype]
            both = (x[row, head].astype("float32") for x in (self.record.key_BHTD, self.record.value_BHTD))
            paged = [(x.reshape(1, 1, -1, PAGE, x.shape[-1]), x.shape) for x in both]
            numbers = [np.asarray(codec.decode(codec.encode(x)), np.float64).reshape(shape) for x, shape in paged]
            self.known[dtype, row, head] = numbers
        return self.known[dtype, row, head]


def attention(query_GD, key_SD, value_SD) -> np.ndarray:
    """Scaled queries over keys and values; 0 where there are none."""
    if not len(key_SD):
        return np.zeros((len(query_GD), value_SD.shape[1]))
    logits = query_GD @ key_SD.T
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights @ value_SD / weights.sum(1, keepdims=True)
