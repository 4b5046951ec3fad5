"""Figures of memory in articles against arithmetic: no model runs."""

import math
from typing import Any

from kvlab.claims import base
from kvlab.claims.base import FAILS, HOLDS, Finding
from kvlab.claims.samples import Table
from kvlab.errors import ConfigError
from kvlab.memory import kv_bytes
from kvlab.plan import inputs


class Memory(base.Test, frozen=True, kw_only=True):
    """Bytes of a cache by `kvlab plan`, against what somebody `says` or against growth in proportion to the length.

    Attributes:
      dims, batch, length, dtype, policy: as the options of `kvlab plan`.
      level: "cache" (codes alone), "metadata", "index", "state" or "resident" (all of them).
      says: a figure such as "256 MB" or "206158430208".
      rounded: share by which a figure that is right may still be off, for how coarsely it is written.
      linear: lengths over which the bytes must be in proportion; instead of `says`.
    """

    dims: str
    batch: int = 1
    length: int = 4096
    dtype: str | None = None
    policy: list[str] = []
    level: str = "cache"
    says: str | None = None
    rounded: float = 0.0
    linear: list[int] = []

    def __post_init__(self):
        if (self.says is None) == (not self.linear):
            raise ConfigError(f'{self.name}: give one of says = "256 MB" and linear = [1024, 2048]')

    @property
    def bounds(self) -> int:
        return 0

    def bytes(self, length: int) -> int:
        _, plan = inputs.answer(None, self.dims, self.batch, length, 0, self.policy, self.dtype, None, False)
        return plan.total(self.level)

    def find(self, table: Table, alpha: float) -> Finding:
        return self._growth() if self.linear else self._figure()

    def _figure(self) -> Finding:
        found, said = self.bytes(self.length), inputs.parse_bytes(str(self.says))
        right = abs(found - said) <= self.rounded * found
        text = f"{self.says} is said; {self._formula()} = {found:,} bytes ({binary(found)})"
        if not right:
            text += f": {max(found, said) / min(found, said):.3g} times too {'much' if said > found else 'little'} is said"
        series = {"labels": ["as said", "by arithmetic"], "value": [said, found]}
        return self._made(right, text, float(found), series)

    def _growth(self) -> Finding:
        found = [self.bytes(length) for length in self.linear]
        each = [n / length for n, length in zip(found, self.linear)]
        right = max(each) - min(each) <= self.rounded * min(each)
        text = ", ".join(f"{length:,} tokens {n:,}" for length, n in zip(self.linear, found))
        text += f" bytes: {min(each):,.6g} … {max(each):,.6g} a token"
        return self._made(right, text, float(found[-1]), {"labels": [f"{n:,}" for n in self.linear], "value": found})

    def _made(self, right: bool, text: str, value: float, series: dict[str, Any]) -> Finding:
        outcome = HOLDS if right else FAILS
        return Finding("memory", self.name, self.decides, outcome, text, value, value, value, math.nan, "bytes", series=series)

    def _formula(self) -> str:
        """How plain keys and values add up, where that is what was asked for."""
        shape, size = inputs.read_dims(self.dims), {"float16": 2, "bfloat16": 2, "float32": 4, None: 4}[self.dtype]
        own = kv_bytes(self.batch, self.length, shape.layers, shape.kv_heads, shape.head_dim, size)
        if self.policy or self.level != "cache" or own != self.bytes(self.length):
            return f"{self.level} by kvlab plan"
        factors = (self.batch, self.length, shape.layers, shape.kv_heads, shape.head_dim, size)
        return "2 · " + " · ".join(f"{factor:,}" for factor in factors)

    def draw(self, axis, found: Finding) -> None:
        axis.set_ylabel("GB (powers of 1000)")
        if self.linear:
            axis.loglog(self.linear, [n / 1e9 for n in found.series["value"]], "o-", color="tab:blue")
            axis.set_xlabel("tokens")
            return
        value = [n / 1e9 for n in found.series["value"]]
        axis.bar(range(2), value, width=0.6, color=["0.7", "tab:blue"])
        axis.set_xticks(range(2), found.series["labels"], fontsize="small")


def binary(count: int) -> str:
    """Bytes in powers of 1024."""
    for name, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {name}"
    return f"{count} B"
