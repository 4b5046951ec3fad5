"""What matters for the layer's output, not for attention alone."""

from typing import Any

import jax.numpy as jnp

from kvlab.core import Retention, part, static
from kvlab.errors import ConfigError
from kvlab.retention.combinator import Combinator
from kvlab.selection import choose

EPSILON = 1e-4


@part
class CriticalKV(Combinator):
    """`inner` for the share `first` of the budget; the rest goes by inner's priority times what the value adds to the output.

        priority(token) = largest number where inner's priority p is among the ⌊first·budget⌋ highest (1 at least),
                          else (p + 10⁻⁴) · ‖W_o v‖₁

    https://arxiv.org/abs/2502.03805, algorithm 1. Made for p ≥ 0, such as a share of attention: a product with a negative
    priority prefers values that add little. Where inner says ∞ or −∞, that holds. While decoding both halves are chosen
    anew among the stored tokens whenever one has to go.

    Errors: ConfigError for a share outside 0 … 1, or an inner retention that renews its scores: W_o v is known when a token
    comes, not later from what is stored.
    """

    inner: Any
    first: float = static(default=0.5)

    def __post_init__(self):
        if not 0 <= self.first <= 1:
            raise ConfigError(f"criticalkv: first={self.first}; allowed: 0 … 1, the share of the budget that goes by inner alone")
        if isinstance(self.inner, Retention) and self.inner.renews:
            raise ConfigError(
                f"criticalkv: {self.inner} takes its scores anew from what is stored, which does not say what values add to the "
                "output; allowed: a retention that keeps a token's score, such as key_norm, q_filters or gated"
            )

    @property
    def needs(self):
        return tuple(dict.fromkeys((*self.inner.needs, "output_norm", "budget")))

    def score(self, key, value, pos, **seen):
        return self._with(self.inner.score(key, value, pos, **self._inner(seen)), key, seen)

    def fresh(self, key, value, pos, **seen):
        return self._with(self.inner.fresh(key, value, pos, **self._inner(seen)), key, seen)

    def _inner(self, seen):
        return {name: x for name, x in seen.items() if name in self.inner.needs}

    def _with(self, state, key, seen):
        """The number of first tokens lies beside each, since a priority is not told the budget."""
        number = max(1, int(seen["budget"] * self.first)) if self.first else 0
        return {"inner": state, "norm": seen["output_norm"], "first": jnp.full(key.shape[:3], number, jnp.int32)}

    def observe(self, state, weight, pos, now):
        return {**state, "inner": self.inner.observe(state["inner"], weight, pos, now)}

    def priority(self, state, pos, now):
        own = jnp.broadcast_to(self.inner.priority(state["inner"], pos, now), pos.shape).astype(jnp.float32)
        first = choose.top(own, pos >= 0, pos, state["first"].max(-1))
        most = jnp.finfo(jnp.float32).max
        both = jnp.where(first, most, jnp.minimum((own + EPSILON) * state["norm"], most))
        return jnp.where(jnp.isfinite(own), both, own)
