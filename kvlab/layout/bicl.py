"""Tiles of tokens by channels, keys beside values: the block-interleaved layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab.core import PAGE, Layout, part, static
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import chains

TILES = (32, 64)
BY_LENGTH = "by_length"


@part
class Bicl(Layout):
    """A page is Z tiles of t × t, each a run of memory, in Z-order; the keys' tile lies before the values' of the same place.

    One array `tiles [B, H, N, Z, 2, t, t]` where keys and values have codes of one type and a column per channel, else
    `[B, H, N, Z, w, t]` for keys and `[B, H, N, Z, t, w]` for values: a tile holds t channels, w columns of packed codes. Keys
    lie channel by channel and values token by token, as in `Contiguous` and for its reason. Scales and whatever else a code
    has lie page by page, `[B, H, N, p, C]`. Where the head dimension is no multiple of t, columns of zeros fill the last tiles.

    Attributes:
      tile: t, 64 or 32, or "by_length": 32 for caches of less than `long` tokens when they are filled, else 64; a cache stays
        as it was filled.
      head_dim: channels of a vector, from the model (`at`).
    """

    tile: int | str = static(default=64)
    long: int = static(default=4096)
    head_dim: int | None = static(default=None, repr=False)

    by_page = True
    native = 64

    def __post_init__(self):
        if self.tile not in (*TILES, BY_LENGTH):
            raise ConfigError(f'bicl layout: tile={self.tile!r}; allowed: {", ".join(map(str, TILES))} and "{BY_LENGTH}"')
        if self.long < 0:
            raise ConfigError(f"bicl layout: long={self.long}; allowed: 0 tokens or more, such as 4096")

    def at(self, layer: int, model) -> "Bicl":
        return self if self.head_dim == model.head_dim else dataclasses.replace(self, head_dim=model.head_dim)

    def side(self, pages: int) -> int:
        """t of a cache of so many pages."""
        if self.tile == BY_LENGTH:
            return TILES[pages * PAGE >= self.long]
        return int(self.tile)

    def overhead(self, codec, dim: int, pages: int) -> int:
        vector = jax.ShapeDtypeStruct((1, 1, 1, PAGE, dim), jnp.float32), jax.ShapeDtypeStruct((1, 1, 1, PAGE), jnp.int32)
        t, total = self.side(pages), 0
        for each in (codec.keys, codec.values):
            x = jax.eval_shape(each.encode, *vector)["x"]
            total += PAGE * (-(-dim // t) * _width(x.shape[-1], dim, t) - x.shape[-1]) * x.dtype.itemsize
        return total

    def pack(self, code, held_BHN):
        if self.head_dim is None:
            raise ConfigError("bicl layout: no head dimension; use it inside a model, or bind it first: policy.at(layer, config)")
        k, v = code["k"]["x"], code["v"]["x"]
        t = self.side(held_BHN.shape[2])
        widths = [_width(x.shape[-1], self.head_dim, t) for x in (k, v)]
        memory = {side: {name: x for name, x in code[side].items() if name != "x"} for side in ("k", "v")}
        keys, values = jnp.swapaxes(_tiled(k, t, widths[0]), -1, -2), _tiled(v, t, widths[1])
        if keys.dtype == values.dtype and widths == [t, t]:
            return {**memory, "tiles": jnp.stack([keys, values], 4)}
        return {"k": {**memory["k"], "x": keys}, "v": {**memory["v"], "x": values}}

    def write(self, memory, page_BH, offset_BH, code):
        t, row_head = _size(memory), jnp.indices(page_BH.shape, sparse=True)

        def beside(old, new):
            at = (*row_head, page_BH) if offset_BH is None else (*row_head, page_BH, offset_BH)
            return old.at[at].set(new.reshape(*page_BH.shape, *old.shape[len(at) :]), mode="drop")

        def whole(old, new, of, keys):
            new = _tiled(new, t, _columns(old, of, keys))[:, :, 0]
            return old.at[(*row_head, page_BH, slice(None), *of)].set(jnp.swapaxes(new, -1, -2) if keys else new, mode="drop")

        def token(old, new, of, keys):
            w, (R, C) = _columns(old, of, keys), _grid(old, t)
            new = jnp.pad(new.reshape(*page_BH.shape, -1), ((0, 0), (0, 0), (0, C * w - new.shape[-1])))
            row, head, page, p = (x[..., None] for x in (*row_head, page_BH, offset_BH % t))
            tile, inside = jnp.asarray(order(R, C))[offset_BH // t], (slice(None), p) if keys else (p,)
            return old.at[(row, head, page, tile, *of, *inside)].set(new.reshape(*page_BH.shape, C, w), mode="drop")

        put = whole if offset_BH is None else token
        done = {side: {name: beside(x, code[side][name]) for name, x in memory[side].items() if name != "x"} for side in "kv"}
        if "tiles" in memory:
            tiles = put(memory["tiles"], code["k"]["x"], (0,), True)
            return {**done, "tiles": put(tiles, code["v"]["x"], (1,), False)}
        x = {side: put(memory[side]["x"], code[side]["x"], (), side == "k") for side in "kv"}
        return {side: {**done[side], "x": x[side]} for side in "kv"}

    def slice(self, memory, start, pages: int):
        cut = lambda x: x if pages == x.shape[2] else lax.dynamic_slice_in_dim(x, start, pages, 2)
        return self._canonical(jax.tree.map(cut, memory))

    def pages(self, memory, page_BHR):
        # behind a barrier, so that pages are copied whole and not number by number where they are unpacked
        at = lambda x: page_BHR.reshape(*page_BHR.shape, *(1,) * (x.ndim - 3))
        cut = lambda x: lax.optimization_barrier(jnp.take_along_axis(x, at(x), 2, mode="clip"))
        return self._canonical(jax.tree.map(cut, memory))

    def tokens(self, memory, slot_BHR):
        t, page, offset = _size(memory), slot_BHR // PAGE, slot_BHR % PAGE

        def beside(x_BHNpC):
            B, H, N, p, C = x_BHNpC.shape
            row = page * p + offset * p // PAGE
            return jnp.take_along_axis(x_BHNpC.reshape(B, H, N * p, C), row[..., None], 2, mode="clip")[..., None, :]

        def x(tiles, of, keys):
            """Numbers `[B, H, R, 1, C]` of a side, at their places counted through a row and head."""
            R, C = _grid(tiles, t)
            w = _columns(tiles, of, keys)
            tile = page[..., None] * (R * C) + jnp.asarray(order(R, C))[offset // t]  # [B, H, R, C]
            first = (tile * 2 + of[0] if of else tile)[..., None] * (t * w)
            inside = jnp.arange(w) * (t if keys else 1) + (offset % t)[..., None, None] * (1 if keys else w)
            place = (first + inside).reshape(*page.shape[:2], -1)
            got = jnp.take_along_axis(tiles.reshape(*tiles.shape[:2], -1), place, 2, mode="clip")
            return got.reshape(*page.shape, 1, C * w)[..., : self._wide(w, t)]

        return _sides(memory, x, beside)

    def scores(self, memory, query_BHQD, start, pages: int):
        tiles = memory["tiles"]
        return chains.scores(tiles, query_BHQD, order(*_grid(tiles, tiles.shape[-1])), start, pages)

    def mix(self, memory, weight_BHQNP, start):
        tiles = memory["tiles"]
        return chains.mix(tiles, weight_BHQNP, order(*_grid(tiles, tiles.shape[-1])), start)[..., : self.head_dim]

    def _canonical(self, memory):
        t = _size(memory)

        def x(tiles, of, keys):
            w, (R, C) = _columns(tiles, of, keys), _grid(tiles, t)
            tiles = tiles[:, :, :, :, *of]
            tiles = _placed(jnp.swapaxes(tiles, -1, -2) if keys else tiles, order(R, C).reshape(-1))
            rows = jnp.swapaxes(tiles.reshape(*tiles.shape[:3], R, C, t, w), 4, 5)
            return rows.reshape(*tiles.shape[:3], PAGE, C * w)[..., : self._wide(w, t)]

        return _sides(memory, x, lambda x: x)

    def _wide(self, w: int, t: int) -> int:
        """Columns of a code whose tiles have w of them."""
        assert self.head_dim is not None
        return w * self.head_dim // t


@functools.cache
def order(rows: int, columns: int) -> np.ndarray:
    """Where the tile of each row and column of a page lies, `[R, C]`: the rank of its Morton code, the column's bit lowest."""
    spread = lambda i: sum((i >> bit & 1) << 2 * bit for bit in range(16))
    code = np.array([[spread(r) << 1 | spread(c) for c in range(columns)] for r in range(rows)])
    return np.argsort(np.argsort(code, None)).reshape(rows, columns)


def _width(columns: int, dim: int, t: int) -> int:
    """Columns of a code that hold t channels. Errors: RefusedPolicy where these are no whole columns."""
    if t * columns % dim or columns > dim:
        raise RefusedPolicy(
            f"bicl layout: tiles of {t} channels take {t * columns / dim:g} columns of codes that are {columns} wide for "
            f"{dim} channels; allowed: codes of whole columns, at most one a channel; use page_major or another tile"
        )
    return t * columns // dim


def _size(memory) -> int:
    """t of a memory."""
    return memory["tiles"].shape[-1] if "tiles" in memory else memory["v"]["x"].shape[4]


def _grid(tiles, t: int) -> tuple[int, int]:
    """Rows and columns of tiles of a page."""
    return PAGE // t, tiles.shape[3] * t // PAGE


def _columns(tiles, of, keys: bool) -> int:
    return tiles.shape[-1] if of or not keys else tiles.shape[-2]


def _sides(memory, x, beside):
    """Canonical codes: `x(tiles, of, keys)` of each side's tiles, `beside` of every other leaf."""
    code = {side: {name: beside(leaf) for name, leaf in memory[side].items() if name != "x"} for side in ("k", "v")}
    for i, side in enumerate(("k", "v")):
        tiles, of = (memory["tiles"], (i,)) if "tiles" in memory else (memory[side]["x"], ())
        code[side]["x"] = x(tiles, of, side == "k")
    return code


def _tiled(x_BHNPC, t: int, w: int):
    """`[B, H, N, Z, t, w]`, token-major tiles in their order."""
    B, H, N, P, columns = x_BHNPC.shape
    C = -(-columns // w)
    x = jnp.pad(x_BHNPC, ((0, 0),) * 4 + ((0, C * w - columns),))
    x = jnp.swapaxes(x.reshape(B, H, N, P // t, t, C, w), 4, 5).reshape(B, H, N, -1, t, w)
    return _placed(x, np.argsort(order(P // t, C), None))


def _placed(x_BHNZ__, index: np.ndarray):
    """The tiles of each page in another order."""
    return x_BHNZ__ if (index == np.arange(len(index))).all() else x_BHNZ__[:, :, :, index]
