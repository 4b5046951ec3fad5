"""Long keys go first."""

import jax.numpy as jnp

from kvlab.core import part
from kvlab.retention.sized import Sized


@part
class KeyNorm(Sized):
    """Keeps the tokens with the shortest keys: in many models those get the most attention.

        priority(token) = −‖k‖

    https://arxiv.org/abs/2406.11430, section 3. The norm is that of the key as it came, taken once, so while decoding the
    longest key that is stored makes room, the newest token's only from the next step on.
    """

    def score(self, key, value, pos, **seen):
        return -jnp.linalg.norm(key, axis=-1)

    def priority(self, state, pos, now):
        return state
