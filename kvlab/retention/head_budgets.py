"""Heads have budgets of their own, known beforehand."""

from typing import Any

import jax
import jax.numpy as jnp

from kvlab.core import PAGE, part, static
from kvlab.retention import calibrated
from kvlab.retention.combinator import Combinator

KEPT = (0.125, 0.25, 0.5, 0.75)  # shares of the tokens, over all heads, at which a calibration says what each head keeps


@part
class HeadBudgets(Combinator):
    """`inner`, whose heads keep what one threshold for all heads of the model would leave them, as `kvlab calibrate` measured it.

        share(layer, head) = share of the head's tokens above θ,    θ such that `ratio` of all heads' tokens lie below it

    KVzip (https://arxiv.org/abs/2505.23416, section 3.4) has one threshold over all heads of all layers, so some keep nearly
    everything and others a tenth. Which ones do hardly depends on the text, so the shares are constants of the model here: memory
    is known beforehand, and no prompt compiles anew. They are by a replay's importance and serve whatever ranks tokens. Between
    the measured shares they are interpolated; the mean over heads and layers is inner's budget.

    Fields:
      inner: a retention with one budget for all heads.
      profile: the name of a model whose calibration ships, or the path of a file that `kvlab calibrate` wrote.
    """

    inner: Any
    profile: str = static(default="")
    share_KH: Any = None
    unit = PAGE
    uneven = True

    def at(self, layer, model):
        made = super().at(layer, model)
        if self.share_KH is not None:
            return made
        table = calibrated.load(self.profile, "budgets", (len(KEPT), model.layers, model.kv_heads))
        return HeadBudgets(made.inner, self.profile, jnp.asarray(table[:, layer]))

    def priority(self, state, pos, now):
        return self.inner.priority(state, pos, now)

    def shares(self, priority, pos, budget):
        tokens = (pos >= 0).sum(-1).max()
        table = jnp.concatenate([jnp.zeros_like(self.share_KH[:1]), self.share_KH, jnp.ones_like(self.share_KH[:1])])
        at = jnp.minimum(budget / tokens, 1.0), jnp.asarray((0.0, *KEPT, 1.0))
        share_H = jax.vmap(lambda own: jnp.interp(*at, own), 1)(table)
        return jnp.broadcast_to(jnp.maximum(jnp.round(share_H * tokens), 1), priority.shape[:2]).astype(jnp.int32)
