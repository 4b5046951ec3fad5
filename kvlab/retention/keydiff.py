"""Keys unlike the others stay."""

import jax.numpy as jnp

from kvlab.core import PAGE, part, static
from kvlab.retention.sized import Sized


@part
class KeyDiff(Sized):
    """Keeps the tokens whose keys point least where the stored keys point on average.

        priority(token) = −cos(k, a),   a = mean over all stored tokens of k / ‖k‖

    https://arxiv.org/abs/2504.15364, section 3. While decoding a and the priorities are taken anew from what is stored,
    codes included, whenever something has to go; that reads every key, hence pages by default.
    """

    unit: int | None = static(default=PAGE)
    renews = True

    def score(self, key, value, pos, **seen):
        live = (pos >= 0)[..., None]
        unit = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-12)
        mean = jnp.where(live, unit, 0.0).sum(2, keepdims=True) / jnp.maximum(live.sum(2, keepdims=True), 1)
        return -(unit * mean).sum(-1) / jnp.maximum(jnp.linalg.norm(mean, axis=-1), 1e-12)

    def priority(self, state, pos, now):
        return state
