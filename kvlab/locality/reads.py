"""What a decode step reads, and in which order."""

from typing import Literal

import msgspec
import numpy as np

from kvlab.core import PAGE
from kvlab.errors import ConfigError
from kvlab.locality.places import Shape, place


class Reads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys and values of one layer and row, read head after head, block after block: a block's keys, then its values.

    Attributes:
      tokens, kv_heads, head_dim, element: the shape; bytes of a number.
      heads: how many of the heads are read; all are there.
      read: everything ("dense"), whole pages, or single tokens.
      share: of pages or tokens read, drawn by `seed` for each head, in order of position.
      walk: "stored" as the numbers of a block lie in memory, "tokens" token by token, "channels" its keys channel by channel.
      block: tokens of a block.
    """

    tokens: int = 4096
    kv_heads: int = 8
    head_dim: int = 128
    element: int = 2
    heads: int = 2
    read: Literal["dense", "pages", "tokens"] = "dense"
    share: float = 0.125
    walk: Literal["stored", "tokens", "channels"] = "stored"
    block: int = PAGE
    seed: int = 0

    def __post_init__(self):
        units = self.tokens // PAGE
        if self.tokens < 1 or self.tokens % PAGE or not 0 < self.share <= 1 or not 1 <= self.heads <= self.kv_heads:
            raise ConfigError(
                f"reads of {self.tokens} tokens, share {self.share}, {self.heads} of {self.kv_heads} heads; allowed: whole "
                f"pages of {PAGE} tokens, a share above 0 up to 1, and 1 … kv_heads heads"
            )
        if self.read != "dense" and round(units * self.share) < 1:
            raise ConfigError(f"share = {self.share} of {units} pages is none; write more tokens or a larger share")
        if self.block < 1 or self.count % self.block:
            raise ConfigError(f"block = {self.block} does not divide the {self.count} tokens that are read; write {PAGE}")

    @property
    def count(self) -> int:
        """Tokens that a head reads."""
        return self.tokens if self.read == "dense" else round(self.tokens // PAGE * self.share) * PAGE

    @property
    def useful(self) -> int:
        """Bytes of keys and values that are asked for."""
        return 2 * self.heads * self.count * self.head_dim * self.element

    @property
    def words(self) -> str:
        what = {"dense": "everything", "pages": "pages", "tokens": "single tokens"}[self.read]
        walk = {"stored": "as stored", "tokens": "token by token", "channels": "keys channel by channel"}[self.walk]
        return f"{what}, {walk}, {self.block:,} tokens at a time, {self.element} bytes a number"

    def chosen(self):
        """Slots that each head reads, `[heads, count]`, in order."""
        if self.read == "dense":
            return np.tile(np.arange(self.tokens), (self.heads, 1))
        rng, unit = np.random.default_rng(self.seed), PAGE if self.read == "pages" else 1
        draw = lambda: np.sort(rng.choice(self.tokens // unit, self.count // unit, replace=False))
        units = np.stack([draw() for _ in range(self.heads)])
        return (units[..., None] * unit + np.arange(unit)).reshape(self.heads, -1)

    def addresses(self, layout: str):
        """Byte addresses of the numbers read, `[n]`, in order; a layout's padding is read where a block is read as it lies."""
        at, shape = place(layout), Shape(self.tokens, self.kv_heads, self.head_dim)
        s = self.chosen().reshape(self.heads, -1, self.block, 1)
        h = np.arange(self.heads)[:, None, None, None]
        d = np.arange(at.width(self.head_dim) if self.walk == "stored" else self.head_dim)
        kinds = [at.index(kind, h, s, d, shape) for kind in (0, 1)]
        if self.walk == "channels":
            kinds[0] = np.swapaxes(kinds[0], 2, 3)
        flat = np.stack([x.reshape(*x.shape[:2], -1) for x in kinds], 2)
        if self.walk == "stored":
            flat.sort(-1)
        return flat.ravel() * self.element
