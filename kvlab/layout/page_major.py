"""One page after another, for selections that read few of them."""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.core import PAGE, Layout, part


@part
class PageMajor(Layout):
    """Keys lie as `[B, H, N, C, p]`, values as `[B, H, N, p, C]`: a page of either is one run of memory.

    Inside a page keys lie channel by channel and values token by token, as in `Contiguous` and for its reason. There a page
    of keys is C short runs, one per channel and far from each other; here it is copied as fast as memory gives it.
    """

    by_page = True

    def pack(self, code, held_BHN=None):
        return _turned(code)

    def write(self, memory, page_BH, offset_BH, code):
        row, head = jnp.indices(page_BH.shape, sparse=True)

        def put(old, new, *channels):
            if offset_BH is None:
                return old.at[row, head, page_BH].set(new[:, :, 0], mode="drop")
            return old.at[row, head, page_BH, *channels, offset_BH].set(new.reshape(*page_BH.shape, -1), mode="drop")

        keys = jax.tree.map(lambda old, new: put(old, new, slice(None)), memory["k"], _turned(code)["k"])
        return {"k": keys, "v": jax.tree.map(put, memory["v"], code["v"])}

    def slice(self, memory, start, pages: int):
        cut = lambda x: x if pages == x.shape[2] else lax.dynamic_slice_in_dim(x, start, pages, 2)
        return _turned(jax.tree.map(cut, memory))

    def pages(self, memory, page_BHR):
        # behind a barrier, so that pages are copied whole and not number by number where they are unpacked
        cut = lambda x: lax.optimization_barrier(jnp.take_along_axis(x, page_BHR[..., None, None], 2, mode="clip"))
        return _turned(jax.tree.map(cut, memory))

    def tokens(self, memory, slot_BHR):
        page, offset = slot_BHR // PAGE, slot_BHR % PAGE
        keys = jax.tree.map(lambda x: _key_tokens(x, page, offset), memory["k"])
        return {"k": keys, "v": jax.tree.map(lambda x: _value_tokens(x, page, offset), memory["v"])}


def _turned(code):
    """From canonical codes to memory and back: keys swap slots and channels, values stay."""
    return {**code, "k": jax.tree.map(lambda x: jnp.swapaxes(x, 3, 4), code["k"])}


def _key_tokens(x_BHNCp, page_BHR, offset_BHR):
    """`[B, H, R, 1, C]`, number by number and channel after channel: XLA's CPU backend gathers short columns slower."""
    B, H, N, C, p = x_BHNCp.shape
    start = page_BHR * (C * p) + offset_BHR * p // PAGE  # a parameter serves for several tokens in a row
    place = start[:, :, None] + jnp.arange(C)[:, None] * p
    got = jnp.take_along_axis(x_BHNCp.reshape(B, H, N * C * p), place.reshape(B, H, -1), 2, mode="clip")
    return jnp.swapaxes(got.reshape(place.shape), 2, 3)[..., None, :]


def _value_tokens(x_BHNpC, page_BHR, offset_BHR):
    """`[B, H, R, 1, C]`, a run of memory each."""
    B, H, N, p, C = x_BHNpC.shape
    row = page_BHR * p + offset_BHR * p // PAGE
    return jnp.take_along_axis(x_BHNpC.reshape(B, H, N * p, C), row[..., None], 2, mode="clip")[..., None, :]
