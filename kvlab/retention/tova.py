"""What the newest query attends to."""

import jax.numpy as jnp

from kvlab.core import part
from kvlab.retention.last_queries import LastQueries


@part
class TOVA(LastQueries):
    """Keeps what the newest query attends to most: https://arxiv.org/abs/2401.06104.

        priority(i) = ∞ for the newest token, else the mean over all query heads of the layer of a(now, i)

    a is the causal softmax. All KV heads keep the same tokens. While decoding each query's weights replace those of the one
    before, so a token is judged by what the last query alone gave it; that query's own token is safe until the next.
    """

    def score(self, key, value, pos, **seen):
        return self._judged(self.received(seen["queries"], key, pos, 1), pos, pos.max(-1, keepdims=True))

    def fresh(self, key, value, pos, **seen):
        return jnp.full(pos.shape, jnp.inf)

    def observe(self, state, weight, pos, now):
        return self._judged(weight, pos, now)

    def priority(self, state, pos, now):
        return state

    @staticmethod
    def _judged(weight, pos, now):
        # heads that were ranked alike hold the same tokens in the same slots, so the mean is over one token's weights
        mean = jnp.broadcast_to(weight.mean(1, keepdims=True), weight.shape)
        return jnp.where(pos == now, jnp.inf, mean)
