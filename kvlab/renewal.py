"""Scores of all that a cache stores, for retentions whose tokens' scores depend on each other."""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.core import EMPTY, PAGE, Cache


def state(policy, cache: Cache):
    """What the retention of a `Policy` says of every slot, `[B, H, N·P, ...]`, from keys and values as they are read.

    One row and head at a time, so no more than that is ever unpacked.
    """
    B, H = cache.opened.shape

    def head(n):
        row, head = n // H, n % H
        key, value, pos = _stored(policy, cache, row, head)
        order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos))
        one = lambda x: x[order][None, None]
        seen = {"budget": cache.budget, **{name: x[row, head][None, None] for name, x in cache.carried.items()}}
        seen = {name: seen[name] for name in policy.retention.needs}
        found = policy.retention.score(one(key), one(value), one(pos), **seen)
        back = jnp.argsort(order)
        return jax.tree.map(lambda x: x[0, 0][back], found)

    found = lax.map(head, jnp.arange(B * H))
    return jax.tree.map(lambda x: policy.slots.mine(x.reshape(B, H, *x.shape[1:]), cache), found)


def _stored(policy, cache: Cache, row, head):
    """Keys and values `[N·P, D]` and positions `[N·P]` of one head, EMPTY where a slot is not its own."""
    keys, values, at = policy.codec.keys, policy.codec.values, policy.slots.head(head)
    N = cache.pos.shape[2]
    pos = jnp.where(policy.slots.owned(cache)[row, head][:, None], cache.pos[row, at], EMPTY)[None, None]
    code = policy.layout.slice(policy.layout.head(cache.memory, row, at), 0, N)
    both = keys.output(keys.decode(code["k"], pos)), values.output(values.decode(code["v"], pos))
    if policy.tailed:
        number = jnp.where(cache.waiting[row, head] < 0, N, cache.waiting[row, head])
        both = tuple(x.at[0, 0, number].set(tail[row, head], mode="drop") for x, tail in zip(both, cache.tail))
    key, value = (x.reshape(N * PAGE, -1) for x in both)
    return key, value, pos.reshape(-1)
