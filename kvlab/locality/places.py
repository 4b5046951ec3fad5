"""Where the number of a token and channel lies in one layer's memory of one row, layout by layout."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvlab.core import PAGE
from kvlab.errors import ConfigError, nearest
from kvlab.layout.bicl import order


class Shape(NamedTuple):
    """Tokens (whole pages), KV heads and head dim."""

    tokens: int
    heads: int
    dim: int


class Place(NamedTuple):
    """An address map.

    Attributes:
      index: (kind, h, s, d, shape) → the number's place, counted in numbers from the first key; kind 0 is a key, 1 a value.
      width: head dim → channels that are stored, padding included.
    """

    index: Callable
    width: Callable[[int], int] = lambda dim: dim


def _token_major(kind, h, s, d, shape):
    return ((kind * shape.tokens + s) * shape.heads + h) * shape.dim + d


def _head_major(kind, h, s, d, shape):
    return ((kind * shape.heads + h) * shape.tokens + s) * shape.dim + d


def _channel_major(kind, h, s, d, shape):
    """Keys channel by channel: kvlab's `contiguous`."""
    return _head_major(kind, h, s, d, shape) if kind else (h * shape.dim + d) * shape.tokens + s


def _bicl(tile: int, z: bool) -> Place:
    """Tiles of `tile` tokens and channels in each page of a head, keys' and values' in turn; keys' tiles channel by channel."""
    rows = PAGE // tile
    columns = lambda dim: -(-dim // tile)

    def index(kind, h, s, d, shape):
        C = columns(shape.dim)
        ranks = order(rows, C) if z else np.arange(rows * C).reshape(rows, C)
        page = h * (shape.tokens // PAGE) + s // PAGE
        place = (page * rows * C + ranks[s % PAGE // tile, d // tile]) * 2 + kind
        row, column = (s % tile, d % tile) if kind else (d % tile, s % tile)
        return (place * tile + row) * tile + column

    return Place(index, lambda dim: columns(dim) * tile)


PLAIN = {"token_major": Place(_token_major), "head_major": Place(_head_major), "channel_major": Place(_channel_major)}


def place(name: str) -> Place:
    """The layout of a name: token_major, head_major, channel_major, bicl_64, bicl_32 or bicl_32_rows (no Z-order)."""
    if name in PLAIN:
        return PLAIN[name]
    match = re.fullmatch(r"bicl_(32|64)(_rows)?", name)
    if match is None:
        raise ConfigError(f"layout {name!r}; {nearest(name, [*PLAIN, 'bicl_64', 'bicl_32', 'bicl_32_rows'])}")
    return _bicl(int(match[1]), match[2] is None)
