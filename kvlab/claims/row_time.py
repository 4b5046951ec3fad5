"""How fast attention's products read rows of a head dim as they are, and padded, on this machine."""

from typing import Literal

from kvlab.claims.padding import width
from kvlab.claims.timed import Program, Timed
from kvlab.errors import ConfigError
from kvlab.locality import products


class RowTime(Timed, frozen=True, kw_only=True):
    """By which factor both products of decode attention are faster over padded rows than over rows as long as the head dim.

    Attributes:
      dims, dtype, rule: as in `kvlab.claims.padding`; a head dim that needs no padding is refused.
      tokens, kv_heads, queries: of one layer and row; queries per KV head.
    """

    dims: list[int]
    dtype: Literal["float32", "float16", "int8"] = "float32"
    rule: Literal["256", "power", "both"] = "256"
    tokens: int = 8192
    kv_heads: int = 4
    queries: int = 4

    def __post_init__(self):
        if whole := [dim for dim in self.dims if width(dim, self.dtype, self.rule) == dim]:
            raise ConfigError(f"{self.name}: rows of {whole} numbers need no padding in {self.dtype}; leave them out of dims")
        if self.tokens < 1 or self.tokens % products.BLOCK:
            raise ConfigError(f"{self.name}: tokens = {self.tokens}; allowed: multiples of {products.BLOCK}")

    def programs(self) -> list[tuple[Program, Program]]:
        return [(self._program(dim, dim), self._program(dim, width(dim, self.dtype, self.rule))) for dim in self.dims]

    def said(self) -> str:
        return f"{self.dtype}, padded rows against rows as they are "

    def _program(self, dim: int, stored: int) -> Program:
        rows = products.Rows(self.tokens, self.kv_heads, self.queries, dim, stored, self.dtype)
        return Program(f"{dim} as {stored}" if stored > dim else str(dim), products.program(rows), rows.useful)
