"""Heads that need more tokens get more."""

from typing import Any

import jax.numpy as jnp

from kvlab.core import PAGE, part
from kvlab.errors import ConfigError
from kvlab.retention.combinator import Combinator


@part
class AdaKV(Combinator):
    """`inner`, whose heads share one budget: the tokens of highest priority in any head of a layer stay.

        share(head) = |{top H·budget of all heads' tokens} ∩ head|        at least ⌊safeguard · budget⌋ each

    https://arxiv.org/abs/2407.11550, algorithm 1. Priorities must be comparable between heads, as attention weights are. The
    shares are set by the prompt; while decoding each head evicts pages of its own. Memory is the sum of what the heads have,
    in whole pages and at least two of them, because the open one has to stay.

    Fields:
      inner: a retention with one budget for all heads.
      safeguard: share of the equal budget that every head gets, 0 … 1.
    """

    inner: Any
    safeguard: float = 0.2
    unit = PAGE
    uneven = True

    def budget(self, prompt, total, unit):
        if not 0 <= self.safeguard <= 1:
            raise ConfigError(f"adakv: safeguard={self.safeguard}; allowed: 0 … 1")
        return self.inner.budget(prompt, total, unit)

    def priority(self, state, pos, now):
        return self.inner.priority(state, pos, now)

    def shares(self, priority, pos, budget):
        B, H, T = priority.shape
        own = jnp.argsort(jnp.argsort(-priority, -1), -1)  # rank inside the head
        safe = own < jnp.floor(self.safeguard * budget + 1e-6)
        ranked = jnp.where(safe, jnp.inf, priority).reshape(B, H * T)
        first = jnp.argsort(jnp.argsort(-ranked, -1), -1) < min(H * budget, H * T)
        return (first & (ranked > -jnp.inf)).reshape(B, H, T).sum(-1, dtype=jnp.int32)
