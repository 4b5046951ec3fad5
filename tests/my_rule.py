"""Retention rules as a user would write them, in a file of their own."""

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


@part
class LongInputs(Retention):
    """Keeps the tokens whose layer input is longest: a rule that needs more of a prompt than keys and values."""

    size: int = static(default=64)
    needs = ("hidden",)

    def budget(self, prompt, total, unit):
        return self.size

    def score(self, key, value, pos, hidden):
        return jnp.broadcast_to(jnp.linalg.norm(hidden, axis=-1), key.shape[:3])

    def priority(self, state, pos, now):
        return state
