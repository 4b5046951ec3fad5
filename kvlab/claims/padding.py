"""What padded rows cost in bytes and save in sectors, by arithmetic: no model runs and no clock."""

import itertools
from typing import Literal

import numpy as np

from kvlab.claims import base
from kvlab.claims.base import FAILS, HOLDS, Finding
from kvlab.claims.samples import Table
from kvlab.locality.products import TYPES

SECTOR, LINE = 32, 128  # bytes that a GPU fetches at least, and that a cache line of it holds


class Padding(base.Test, frozen=True, kw_only=True):
    """Whether rows of these head dims, padded by `rule`, take at most the share `says` more bytes, on average.

    Attributes:
      rule: "256" for rows of a multiple of 256 bytes, "power" for a power of two numbers, "both".
    """

    dims: list[int]
    dtypes: list[str]
    rule: Literal["256", "power", "both"]
    says: float

    @property
    def bounds(self) -> int:
        return 0

    def find(self, table: Table, alpha: float) -> Finding:
        cases = list(itertools.product(self.dtypes, self.dims))
        more = [width(dim, dtype, self.rule) / dim - 1 for dtype, dim in cases]
        mean = float(np.mean(more))
        right = mean <= self.says
        fit = 1 / (1 + self.says)
        fewer = [sum(_fewer(dtype, dim, self.rule, size) for dtype, dim in cases) for size in (SECTOR, LINE)]
        small = sum(share <= self.says for share in more)
        text = (
            f"{mean:+.1%} bytes on average, at most {self.says:+.1%} in {small} of {len(cases)} rows, which is what a row costs "
            f"that was {fit:.0%} full; a read of a row touches fewer sectors in {fewer[0]} of them, fewer lines in {fewer[1]}"
        )
        series = {"labels": [f"{dtype} {dim}" for dtype, dim in cases], "value": more}
        return Finding(
            "padding", self.name, self.decides, HOLDS if right else FAILS, text, mean, mean, mean, self.says, "of the bytes",
            series=series, table=[self._row(dtype, dim) for dtype, dim in cases],
        )  # fmt: skip

    def _row(self, dtype: str, dim: int) -> dict[str, str]:
        own, padded = dim * TYPES[dtype], width(dim, dtype, self.rule) * TYPES[dtype]
        pair = lambda size: " → ".join(f"{touched(own, row, size):.3g}" for row in (own, padded))
        return {
            "row": f"{dtype} {dim}",
            "bytes": f"{own} → {padded}",
            "more": f"{padded / own - 1:+.0%}",
            f"sectors of {SECTOR} bytes that a row's read touches": pair(SECTOR),
            f"lines of {LINE}": pair(LINE),
        }

    def draw(self, axis, found: Finding) -> None:
        value = [100 * x for x in found.series["value"]]
        axis.barh(range(len(value)), value, color="tab:blue")
        axis.set_yticks(range(len(value)), found.series["labels"], fontsize=6)
        axis.axvline(100 * self.says, color="tab:red", label="what was said")
        axis.set_xlabel("bytes more, %")
        axis.legend(frameon=False, fontsize="small")


def width(dim: int, dtype: str, rule: str) -> int:
    """Numbers of a padded row."""
    padded = dim if rule == "256" else 1 << (dim - 1).bit_length()
    per_256 = 256 // TYPES[dtype]
    return padded if rule == "power" else -(-padded // per_256) * per_256


def touched(useful: int, row: int, size: int) -> float:
    """Units of `size` bytes in which the first `useful` bytes of a row lie; the mean over rows of `row` bytes side by side."""
    start = np.arange(size) * row
    return float(np.mean((start + useful - 1) // size - start // size + 1))


def _fewer(dtype: str, dim: int, rule: str, size: int) -> bool:
    """Whether fewer units of `size` bytes are touched where rows are padded."""
    own, padded = dim * TYPES[dtype], width(dim, dtype, rule) * TYPES[dtype]
    return touched(own, padded, size) < touched(own, own, size)
