"""Pages anywhere in one store, found through a table: rows that share a prompt share its pages."""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.core import EMPTY, PAGE, Layout, part


@part
class Paged(Layout):
    """Keys lie as `[M, C, p]`, values as `[M, p, C]`; a table `[B, H, N]` says where each page of a row and head is, −1 nowhere.

    As PagedAttention, https://arxiv.org/abs/2309.06180, section 4, with nothing but the table: a page is free when no table
    names it. A page gets a place when it is committed and never changes afterwards, so a fork copies the table alone and what
    it writes later goes elsewhere. `rows` sets how many places there are from then on; the host says how many, and lets
    nobody decode further than they last.
    """

    whole_pages = True
    by_page = True
    shares = True

    def overhead(self, codec, dim, pages):
        return 4  # a page's entry in the table

    def pack(self, code, held_BHN):
        B, H, N = held_BHN.shape
        table = jnp.where(held_BHN, jnp.arange(B * H * N, dtype=jnp.int32).reshape(B, H, N), EMPTY)
        return {**jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), _turned(code)), "table": table}

    def write(self, memory, page_BH, offset_BH, code):
        table, place = self.claim(memory, page_BH)
        put = lambda old, new: old.at[place].set(new[:, :, 0], mode="drop")
        codes = jax.tree.map(put, {"k": memory["k"], "v": memory["v"]}, _turned(code))
        return {**codes, "table": table}

    def claim(self, memory, page_BH):
        """The table with a free place for each page, instead of the one that it had, and these places, `[B, H]`: M for none."""
        table = memory["table"]
        row, head = jnp.indices(page_BH.shape, sparse=True)
        given_up = table.at[row, head, page_BH].set(EMPTY, mode="drop")
        writes = page_BH < table.shape[2]
        nth = jnp.cumsum(writes.reshape(-1)).reshape(page_BH.shape) - 1
        places = len(memory["v"]["x"])
        place = jnp.where(writes, _free(given_up, places)[jnp.where(writes, nth, 0)], places)
        return given_up.at[row, head, page_BH].set(place.astype(jnp.int32), mode="drop"), place

    def head(self, memory, row, head):
        return {**memory, "table": memory["table"][row, head][None, None]}

    def slice(self, memory, start, pages: int):
        return self._named(memory, lax.dynamic_slice_in_dim(memory["table"], start, pages, 2))

    def pages(self, memory, page_BHR):
        return self._named(memory, jnp.take_along_axis(memory["table"], page_BHR, 2, mode="clip"))

    def tokens(self, memory, slot_BHR):
        place = jnp.maximum(jnp.take_along_axis(memory["table"], slot_BHR // PAGE, 2, mode="clip"), 0)
        at = lambda p: slot_BHR % PAGE * p // PAGE
        keys = jax.tree.map(lambda x: x[place, :, at(x.shape[2])][..., None, :], memory["k"])
        return {"k": keys, "v": jax.tree.map(lambda x: x[place, at(x.shape[1])][..., None, :], memory["v"])}

    def rows(self, memory, index, places=None):
        """The named rows' tables over a store of `places` pages, into which what they name is moved together."""
        table, have = memory["table"][index], len(memory["v"]["x"])
        used = _used(table, have)
        order = jnp.argsort(~used)[: places or have]
        moved = jnp.argsort(jnp.argsort(~used)).astype(jnp.int32)

        def move(x):
            got = x[order]
            return jnp.pad(got, ((0, (places or have) - len(got)), *((0, 0),) * (x.ndim - 1)))

        codes = jax.tree.map(move, {"k": memory["k"], "v": memory["v"]})
        return {**codes, "table": jnp.where(table >= 0, moved[jnp.maximum(table, 0)], EMPTY)}

    def forget(self, memory, held_BHN):
        return {**memory, "table": jnp.where(held_BHN, memory["table"], EMPTY)}

    def used(self, memory, index):
        return _used(memory["table"][index], len(memory["v"]["x"])).sum()

    def free(self, memory):
        return (~_used(memory["table"], len(memory["v"]["x"]))).sum()

    def _named(self, memory, place_BHR):
        place = jnp.maximum(place_BHR, 0)
        return _turned(jax.tree.map(lambda x: lax.optimization_barrier(x[place]), {"k": memory["k"], "v": memory["v"]}))


def _used(table, places: int):
    """Which places a table names, `[M]`."""
    named = jnp.where(table >= 0, table, places).reshape(-1)
    return jnp.zeros(places, bool).at[named].set(True, mode="drop")


def _free(table, places: int):
    """Places that no table names, in order, first in an array `[M]`."""
    return jnp.argsort(_used(table, places))


def _turned(code):
    """From canonical codes to memory and back: keys swap slots and channels, values stay."""
    return {"k": jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), code["k"]), "v": code["v"]}
