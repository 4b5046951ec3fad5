"""Where a page's codes lie, layout by layout, as a kernel finds them: one class for each.

    lead     the indices of a page's part of a leaf, before those inside the page
    inside   the indices of a piece of some tokens' vectors inside a page

`row` is a page's row of tiles and `piece` one of `pieces`: the tile column, the first channel in it, how many, and the first
channel of all. Both are the plain page's one where the layout has no tiles.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jax.experimental import pallas as pl

from kvlab.core import PAGE
from kvlab.kernels.page import Numbers
from kvlab.layout.bicl import order


class Piece(NamedTuple):
    column: int
    start: int
    width: int
    first: int


def powers(width: int, most: int = PAGE) -> list[int]:
    """Powers of two that add up to `width`, the largest first, none above `most`."""
    whole, rest = divmod(width, most)
    return [most] * whole + [1 << i for i in range(rest.bit_length() - 1, -1, -1) if rest >> i & 1]


@dataclasses.dataclass(frozen=True)
class PageMajor:
    """Keys `[B, H, N, C, p]`, values `[B, H, N, p, C]`."""

    dim: int
    tile: int = PAGE
    canonical = False  # whether keys' parameters lie token-major

    @property
    def rows(self) -> int:
        return PAGE // self.tile

    def pieces(self, in_powers: bool) -> list[Piece]:
        widths = powers(self.dim) if in_powers else [self.dim]
        return [Piece(0, first, w, first) for first, w in zip(_starts(widths), widths)]

    def leaf(self, memory, side: str, name: str):
        return memory[side][name]

    def lead(self, row, head, page, place):
        return row, head, page

    def shape(self, leaf, side: str, name: str) -> tuple[int, int]:
        """Tokens and columns of a page in a leaf, as in a canonical code."""
        return leaf.shape[-2:][:: -1 if side == "k" else 1]

    def inside(self, shape, side: str, name: str, row: int, piece: Piece, page=0):
        tokens = pl.ds(row * self.tile, self.tile) if shape[0] > 1 else pl.ds(0, 1)
        columns = pl.ds(piece.first, piece.width) if shape[1] > 1 else pl.ds(0, 1)
        return (columns, tokens) if side == "k" and not self.canonical else (tokens, columns)


class Paged(PageMajor):
    """Keys `[M, C, p]`, values `[M, p, C]`, at the place that a table names."""

    def lead(self, row, head, page, place):
        return (place,)


@dataclasses.dataclass(frozen=True)
class Contiguous(PageMajor):
    """Keys `[B, H, C, N·p]`, values `[B, H, N·p, C]`; `pages` is N."""

    pages: int = 0

    def shape(self, leaf, side, name):
        across, along = leaf.shape[-2:] if side == "k" else leaf.shape[:-3:-1]
        return along // self.pages, across

    def lead(self, row, head, page, place):
        return row, head

    def inside(self, shape, side, name, row, piece, page=0):
        columns = pl.ds(piece.first, piece.width) if shape[1] > 1 else pl.ds(0, 1)
        tokens = pl.ds(page * shape[0], shape[0])
        return (columns, tokens) if side == "k" else (tokens, columns)


@dataclasses.dataclass(frozen=True)
class Bicl(PageMajor):
    """Tiles `[B, H, N, Z, 2, t, t]` of both, or `[B, H, N, Z, t, t]` of each; parameters lie as `[B, H, N, p, C]`.

    Columns of zeros that fill a tile are never read.
    """

    joined: bool = True
    canonical = True

    def pieces(self, in_powers: bool) -> list[Piece]:
        found = []
        for column in range(-(-self.dim // self.tile)):
            width = min(self.tile, self.dim - column * self.tile)
            widths = powers(width) if in_powers else [width]
            found += [Piece(column, s, w, column * self.tile + s) for s, w in zip(_starts(widths), widths)]
        return found

    def leaf(self, memory, side, name):
        return memory["tiles"] if name == "x" and self.joined else memory[side][name]

    def shape(self, leaf, side, name):
        return (PAGE, self.dim) if name == "x" else leaf.shape[-2:]

    def inside(self, shape, side, name, row, piece, page=0):
        if name != "x":
            return super().inside(shape, side, name, row, piece)
        z = int(order(self.rows, -(-self.dim // self.tile))[row, piece.column])
        columns, tokens = pl.ds(piece.start, piece.width), pl.ds(0, self.tile)
        of = ("kv".index(side),) if self.joined else ()
        return (z, *of, *((columns, tokens) if side == "k" else (tokens, columns)))


def _starts(widths: list[int]) -> list[int]:
    return [sum(widths[:i]) for i in range(len(widths))]


def numbers(place, memory, side: str, load: Callable, widen: Callable, lying: Callable) -> Numbers:
    """A piece of some tokens' keys or values with its scale, where there is one.

    Args:
      load: from a leaf and its name to the piece of it, as it lies.
      widen: from codes to numbers (`kvlab.kernels.codes`).
      lying: from `[n, 1]` to `[1, n]`.
    """
    x = widen(load(place.leaf(memory, side, "x"), "x"))
    if "scale" not in memory[side]:
        return Numbers(x)
    leaf = place.leaf(memory, side, "scale")
    scale = load(leaf, "scale")
    tokens, columns = place.shape(leaf, side, "scale")
    return Numbers(x, **{"channel" if tokens == 1 < columns else "token": scale if scale.shape[0] == 1 else lying(scale)})
