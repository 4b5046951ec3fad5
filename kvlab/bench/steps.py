"""Decode steps of the caches alone, without a model's weights."""

import jax
import jax.numpy as jnp

from kvlab.attention import AttentionSpec


def steps(policies, caches, query_BHQD, stored, count: int):
    """`count` tokens after `stored`, each through all layers: the caches and the last output.

    A layer's output is the next one's query, and a key is made of the query, so that no step can begin before the last one ended.
    """
    spec = AttentionSpec(query_BHQD.shape[-1] ** -0.5)

    def step(i, carry):
        caches, x = carry
        pos, new = jnp.full(1, stored) + i, []
        for policy, cache in zip(policies, caches):
            key = x.mean(2)
            done = policy.attend(policy.append(cache, key, jnp.sin(key), pos), x, pos, spec)
            new.append(done.cache)
            x = jnp.tanh(x + done.out_BHQD)
        return tuple(new), x

    return jax.lax.fori_loop(0, count, step, (caches, query_BHQD))
