"""One array per leaf, a row and a head after another."""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.core import PAGE, Layout, part

RUN = 8  # slots


@part
class Contiguous(Layout):
    """Keys lie as `[B, H, C, N·p]`, channel by channel, values as `[B, H, N·p, C]`, token by token.

    So both products of decode attention stream rows of memory: queries times keys reads along slots, weights times
    values along channels. On a CPU that reads keys 1.6 times faster than token-major keys do.
    """

    def pack(self, code, held_BHN=None):
        keys = jax.tree.map(lambda x: jnp.swapaxes(_rows(x), 2, 3), code["k"])
        return {"k": keys, "v": jax.tree.map(_rows, code["v"])}

    def write(self, memory, page_BH, offset_BH, code):
        def put(old, new, axis):
            width = new.shape[3]  # of this leaf: one token, all 64 of a page, or its parameters
            per_page = PAGE if offset_BH is not None else width
            start = page_BH * per_page + (0 if offset_BH is None else offset_BH)
            new = new[:, :, 0]
            return _put(old, start, new if axis == 2 else jnp.swapaxes(new, 2, 3), axis)

        keys = jax.tree.map(lambda old, new: put(old, new, 3), memory["k"], code["k"])
        return {"k": keys, "v": jax.tree.map(lambda old, new: put(old, new, 2), memory["v"], code["v"])}

    def slice(self, memory, start, pages: int):
        def cut(x, axis, p):
            size = pages * p
            return x if size == x.shape[axis] else lax.dynamic_slice_in_dim(x, start * p, size, axis)

        return _canonical(memory, cut)

    def pages(self, memory, page_BHR):
        # whole pages at an index; in runs of RUN, because XLA's CPU backend copies runs of 64 number by number
        def cut(x, axis, p):
            runs = (-1, p // RUN, RUN) if axis == 3 and p % RUN == 0 else (-1, p)
            paged = x.reshape(*x.shape[:axis], *runs, *x.shape[axis + 1 :])
            page = page_BHR.reshape(*page_BHR.shape[:2], *(1,) * (axis - 2), -1, *(1,) * (paged.ndim - axis - 1))
            got = lax.optimization_barrier(jnp.take_along_axis(paged, page, axis, mode="clip"))
            return got.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

        return _canonical(memory, cut)

    def tokens(self, memory, slot_BHR):
        def cut(x, axis, p):
            index = jnp.expand_dims(slot_BHR * p // PAGE, 5 - axis)
            return jnp.take_along_axis(x, index, axis, mode="clip")

        return _canonical(memory, cut, single=True)


def _rows(x_BHNpC):
    """`[B, H, N, p, C]` → `[B, H, N·p, C]`."""
    return x_BHNpC.reshape(*x_BHNpC.shape[:2], -1, x_BHNpC.shape[-1])


def _canonical(memory, cut, single=False):
    """Cuts every leaf along its slots and gives it the canonical shape `[B, H, N, p, C]`."""
    slots = memory["v"]["x"].shape[2]

    def keys(x):
        p = x.shape[3] * PAGE // slots
        x = cut(x, 3, p)
        x = x.reshape(*x.shape[:3], -1, 1 if single else p)
        return jnp.moveaxis(x, 2, 4)

    def values(x):
        p = x.shape[2] * PAGE // slots
        x = cut(x, 2, p)
        return x.reshape(*x.shape[:2], -1, 1 if single else p, x.shape[-1])

    return {"k": jax.tree.map(keys, memory["k"]), "v": jax.tree.map(values, memory["v"])}


def _put(old, start_BH, new, axis):
    """Writes `new [B, H, ·, ·]` into `old` at `start` along `axis`, per row and head; out of range is dropped whole."""
    row, head = (jnp.broadcast_to(i, start_BH.shape) for i in jnp.indices(start_BH.shape, sparse=True))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, axis)
    )
    index = jnp.stack([row, head, start_BH.astype(row.dtype)], -1)
    return lax.scatter(
        old, index, new.astype(old.dtype), numbers,
        unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP,
    )  # fmt: skip
