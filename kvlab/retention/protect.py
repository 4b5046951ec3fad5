"""Some tokens never go."""

from typing import Any

import jax.numpy as jnp

from kvlab.core import Visibility, part
from kvlab.errors import ConfigError
from kvlab.retention.combinator import Combinator
from kvlab.retention.window import span


@part
class Protect(Combinator):
    """`inner`, except that the first `sinks` tokens and the last `recent` (the current one included) always stay.

        priority(pos) = ∞ where pos < sinks or pos > now − recent, else inner's

    Protection is a mask, not a large score, so it never loses a tie. The first tokens collect attention that every later
    token leans on: https://arxiv.org/abs/2309.17453, section 3.1. Errors: ConfigError if inner's budget cannot hold them.
    """

    inner: Any
    sinks: int = 4
    recent: int = 64

    def budget(self, prompt, total, unit):
        if self.sinks < 0 or self.recent < 0:
            raise ConfigError(f"protect: sinks={self.sinks}, recent={self.recent}; both must be ≥ 0")
        given, need = self.inner.budget(prompt, total, unit), span(self.sinks, self.recent, unit)
        if min(given, total) < min(need, total):
            raise ConfigError(
                f"protect: sinks={self.sinks} and recent={self.recent} need {need} tokens, {self.inner} keeps {given}; "
                "give it a larger budget or protect fewer"
            )
        return given

    def priority(self, state, pos, now):
        safe = (pos < self.sinks) | (pos > now - self.recent)
        inner = self.inner.priority(state, pos, now).astype(jnp.float32)
        return jnp.where(safe, jnp.inf, jnp.minimum(inner, jnp.finfo(jnp.float32).max))  # inner's ∞ must not tie

    def visibility(self):
        seen = self.inner.visibility()
        if seen.window is None:
            return seen
        return Visibility(jnp.maximum(seen.sinks, self.sinks), jnp.maximum(seen.window, self.recent))
