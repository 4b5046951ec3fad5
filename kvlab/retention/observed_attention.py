"""What got the most attention for its age."""

import jax.numpy as jnp

from kvlab.core import part
from kvlab.retention.sized import Sized


@part
class ObservedAttention(Sized):
    """Keeps the tokens with the largest mean attention over the queries that could see them.

        priority(i) = Σ_{q ≥ i} a(q, i) / (t − i + 1)        t: the last query

    The sums of https://arxiv.org/abs/2306.14048 (`H2O`), but with the advantage of age taken out: a token that 10 queries
    have seen is compared with one that 1000 have. a is the causal softmax, the mean over the query heads of a KV head. While
    decoding sum and count go on, kept as a running mean. No token is safe: a new one stands on what its own query gave it.
    """

    needs = ("attention",)
    observes = True

    def score(self, key, value, pos, **seen):
        return seen["attention"] / (pos.max(-1, keepdims=True) - pos + 1)

    def fresh(self, key, value, pos, **seen):
        return jnp.zeros(pos.shape)

    def observe(self, state, weight, pos, now):
        return state + (weight - state) / (now - pos + 1)

    def priority(self, state, pos, now):
        return state
