"""What queries to come can be expected to attend to."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import nn

from kvlab.attention import rotary, rotate
from kvlab.core import PAGE, part, static
from kvlab.errors import ConfigError
from kvlab.retention.sized import Sized


@part
class ExpectedAttention(Sized):
    """Keeps the tokens that queries at the next `future` positions would attend to, if they were like the prompt's.

        priority(token) = (mean over query heads of softmax over tokens of (s·k·μ + s²·kᵀΣk / 2) + epsilon) · ‖v‖
        μ = R m, Σ = R C Rᵀ, with m and C the mean and covariance of the prompt's queries before rotation, s attention's
        scale (1/√d) and R the mean of the rotary embedding's matrices over the `future` positions after the newest token

    https://arxiv.org/abs/2510.00636, section 3. The first `sinks` tokens never go and are left out of the softmax. While
    decoding m and C stay the prompt's; R, the softmax and with them all priorities are taken anew from what is stored
    whenever something has to go. That reads every key and value, hence pages by default.

    Errors: ConfigError if there are no rotary frequencies, which `at` takes from the model.
    """

    sinks: int = 4
    future: int = static(default=512)
    epsilon: float = 0.0
    unit: int | None = static(default=PAGE)
    frequency: Any = None
    scale: Any = None
    needs = ("query_mean", "query_cov")
    renews = True

    def at(self, layer, model):
        if self.frequency is not None:
            return self
        frequency = jnp.asarray(model.rope(layer).frequencies(model.head_dim))
        return dataclasses.replace(self, frequency=frequency, scale=model.attention(layer).scale)

    def score(self, key, value, pos, **seen):
        if self.frequency is None:
            raise ConfigError("expected_attention: no rotary frequencies; write policy.at(layer, model.config) first")
        mean, cov = self._ahead(pos.max(-1), seen["query_mean"], seen["query_cov"])
        logits = self.scale * jnp.einsum("bhtd,bhgd->bhgt", key, mean)
        spread = jnp.einsum("bhtd,bhgde->bhgte", key, cov)  # in two products: one over all three may form k kᵀ of every token
        logits += self.scale**2 / 2 * jnp.einsum("bhgte,bhte->bhgt", spread, key)
        counted = (pos >= self.sinks)[:, :, None]
        weight = nn.softmax(jnp.where(counted, logits, -1e30), -1).mean(2)
        return jnp.where(pos < self.sinks, jnp.inf, (weight + self.epsilon) * jnp.linalg.norm(value, axis=-1))

    def _ahead(self, newest, mean, cov):
        """Mean and covariance of queries turned by the average rotation over the positions after `newest [B, 1 or H]`."""
        turns = rotary(newest[..., None] + 1 + jnp.arange(self.future), self.frequency)
        cos, sin = (x.mean(2)[:, :, None] for x in turns)
        turn = lambda x: jnp.swapaxes(rotate(x, cos[:, :, None], sin[:, :, None]), 3, 4)
        return rotate(mean, cos, sin), turn(turn(cov))

    def priority(self, state, pos, now):
        return state
