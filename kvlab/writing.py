"""Where a new token goes, which pages wait in the tail, and how they get into memory.

`policy` is a `kvlab.policy.Policy`. A page is placed when it opens and committed when it is full.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import ranking, reading
from kvlab.core import EMPTY, PAGE, Cache
from kvlab.kernels import commit


def encode(policy, key, value, pos):
    """Codes of keys and values, `{"k": …, "v": …}`."""
    return {"k": policy.codec.keys.encode(key, pos), "v": policy.codec.values.encode(value, pos)}


def waiting(policy, count_BH, first):
    """The pages in the tail of a cache that holds `count` tokens in order, and how many tokens the open one has."""
    last, offset = (count_BH - 1) // PAGE, (count_BH - 1) % PAGE + 1
    open_ = jnp.where(offset < PAGE, last, last + 1)
    number = open_[..., None] + jnp.arange(1 - policy.waits, 1)
    return jnp.where((number >= 0) & (number <= last[..., None]), number + first, EMPTY).astype(jnp.int32), offset


def held(policy, pos, waiting_BHW):
    """Pages whose codes are needed, `[B, H, N]`: they hold something that does not wait in the tail."""
    some = (pos >= 0).any(-1)
    if not policy.tailed:
        return some
    waits = reading.in_tail(waiting_BHW, jnp.arange(some.shape[2]))
    return some & ~(waits.any(1, keepdims=True) if policy.slots.pooled else waits)


def place(policy, cache: Cache, pos_B, live):
    """Page and offset for the next token, whether it opens a new unit, and whether another one goes for it."""
    fresh = live & (cache.offset == PAGE) if policy.unit > 1 else live
    unit, evicts = cache.opened + policy.slots.first(cache), jnp.zeros_like(fresh)
    if policy.retention.evicts:
        evicts = fresh & (cache.opened >= policy.slots.quota(cache, policy.unit))
        unit = lax.cond(evicts.any(), lambda: jnp.where(evicts, ranking.victim(policy, cache, pos_B), unit), lambda: unit)
    if policy.unit > 1:
        return jnp.where(fresh, unit, cache.waiting[..., -1]), jnp.where(fresh, 0, cache.offset), fresh, evicts
    return unit // PAGE, unit % PAGE, fresh, evicts


def store(policy, cache: Cache, page, offset, key_BHD, value_BHD, pos_BHNP, pos_B):
    """The new token's codes: into memory at once, or into the tail. Returns the waiting pages, the tail, the memory.

    When a page is full, the oldest in the tail is committed, and the others make room for the next.
    """
    used = page < cache.pos.shape[2]
    full, waits = used & (offset == PAGE - 1), cache.waiting
    if policy.unit > 1:
        waits = waits.at[..., -1].set(jnp.where(used, page, waits[..., -1]))
    if not policy.tailed:
        pos = jnp.broadcast_to(pos_B[:, None, None, None], (*page.shape, 1, 1))
        code = encode(policy, key_BHD[:, :, None, None], value_BHD[:, :, None, None], pos)
        waits = jnp.where(full[..., None], EMPTY, waits)
        return waits, (), policy.slots.write(policy.layout, cache.memory, page, offset, code)
    at = (*jnp.indices(page.shape, sparse=True), policy.waits - 1, jnp.where(used, offset, PAGE))
    tail = tuple(x.at[at].set(y, mode="drop") for x, y in zip(cache.tail, (key_BHD, value_BHD)))
    commit = lambda *args: _commit(policy, full, pos_BHNP, *args)
    return lax.cond(full.any(), commit, lambda *same: same, waits, tail, cache.memory)


def _commit(policy, full_BH, pos_BHNP, waits_BHW, tail, memory):
    """The oldest waiting page goes into memory where the open one is full."""
    page = waits_BHW[..., 0]
    pos = policy.slots.pages(pos_BHNP, page[..., None])
    key, value = (jnp.where((pos >= 0)[..., None], x[:, :, :1], 0.0) for x in tail)  # a page may have been cut midway
    page = jnp.where(full_BH & (page >= 0), page, pos_BHNP.shape[2])
    if policy.implementation != "xla" and commit.covers(policy.codec, policy.layout):
        memory = commit.commit(policy.codec, policy.layout, memory, page, key[:, :, 0], value[:, :, 0], policy.implementation)
    else:
        memory = policy.slots.write(policy.layout, memory, page, None, encode(policy, key, value, pos))
    moved = jnp.concatenate([waits_BHW[..., 1:], jnp.full_like(page, EMPTY)[..., None]], -1)
    shift = lambda x: jnp.where(full_BH[..., None, None, None], jnp.roll(x, -1, 2), x) if policy.waits > 1 else x
    return jnp.where(full_BH[..., None], moved, waits_BHW), jax.tree.map(shift, tail), memory
