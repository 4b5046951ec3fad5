"""A retention rule as a user would write it, in a file of their own."""

import jax.numpy as jnp

from kvlab.core import Retention, part, static


@part
class EveryThird(Retention):
    """Keeps every third token as long as there is room, and the newest of the others."""

    size: int = static(default=64)

    def budget(self, prompt, total, unit):
        return self.size

    def priority(self, state, pos, now):
        return jnp.where(pos % 3 == 0, pos + 1e6, pos)
