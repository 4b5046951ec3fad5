"""Heads that retrieve keep everything, the others sinks and recent tokens."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvlab.core import PAGE, Retention, Visibility, part, static
from kvlab.errors import ConfigError
from kvlab.retention import calibrated
from kvlab.retention.window import span

ALL = 2**30  # a window that nothing leaves


@part
class DuoAttention(Retention):
    """The heads that a profile ranks highest are full; the others see the first `sinks` and the last `recent` tokens.

        full(head) ⇔ profile[layer, head] is among the ⌊share · layers · heads⌋ highest of the model

    https://arxiv.org/abs/2410.10819, section 2. There the ranking is trained; here it is how much attention a head gives to
    what a streaming head would not see, measured by `kvlab calibrate`. Streaming heads keep whole pages and mask their window
    to the token.

    Fields:
      profile: the name of a model whose calibration ships, or the path of a file that `kvlab calibrate` wrote.
      share: share of the heads of the model that are full, 0 … 1.
    """

    profile: str = static(default="")
    share: float = static(default=0.5)
    sinks: int = static(default=4)
    recent: int = static(default=256)
    full_H: Any = None
    unit = PAGE
    uneven = True
    aligned = True

    def __post_init__(self):
        if not 0 <= self.share <= 1 or self.sinks < 0 or self.recent < 1:
            given = f"share={self.share}, sinks={self.sinks}, recent={self.recent}"
            raise ConfigError(f"duoattention: {given}; share must be 0 … 1, sinks ≥ 0 and recent ≥ 1")

    def at(self, layer, model):
        if self.full_H is not None:
            return self
        profile = calibrated.load(self.profile, "profile", (model.layers, model.kv_heads))
        number = int(self.share * profile.size + 1e-9)
        rank = np.argsort(np.argsort(-profile, axis=None, kind="stable")).reshape(profile.shape)
        return dataclasses.replace(self, full_H=jnp.asarray(rank[layer] < number))

    def shares(self, priority, pos, budget):
        most = jnp.where(self.full_H, budget, min(span(self.sinks, self.recent, PAGE), budget))
        return jnp.broadcast_to(most, priority.shape[:2]).astype(jnp.int32)

    def priority(self, state, pos, now):
        return jnp.where(pos < self.sinks, jnp.inf, pos)

    def visibility(self):
        return Visibility(self.sinks, jnp.where(self.full_H, ALL, self.recent))
