"""Neighbours stay or go together."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvlab.core import part, static
from kvlab.errors import ConfigError
from kvlab.retention.combinator import Combinator


@part
class ChunkKV(Combinator):
    """`inner`, but by chunks of `length` consecutive positions, which are the same for all KV heads of a layer.

        priority(pos) = mean of inner's priority over the chunk's stored tokens and the KV heads,   chunk = ⌊pos / length⌋

    https://arxiv.org/abs/2502.00299, section 3. Whole chunks go together as far as the budget allows; of the last one that
    fits in part, the newest tokens stay. Where inner says ∞ or −∞ for a token, that holds for the token alone and is no part
    of the mean. While decoding, a chunk's mean is over those of its tokens that are left. Without a model (`at`), which
    says how long a sequence may be, positions beyond the number of slots share one chunk.

    Errors: ConfigError for a length below 1.
    """

    inner: Any
    length: int = static(default=20)
    context: int = static(default=0)

    def __post_init__(self):
        if self.length < 1:
            raise ConfigError(f"chunkkv: length={self.length}; allowed: 1 or more, such as 20")

    def at(self, layer, model):
        inner = self.inner.at(layer, model)
        same = inner is self.inner and self.context == model.context
        return self if same else dataclasses.replace(self, inner=inner, context=model.context)

    def priority(self, state, pos, now):
        own = jnp.broadcast_to(self.inner.priority(state, pos, now), pos.shape).astype(jnp.float32)
        chunks = -(-(self.context or pos.shape[2]) // self.length)
        counted = jnp.isfinite(own) & (pos >= 0)
        at = jnp.arange(len(pos))[:, None, None], jnp.where(counted, jnp.minimum(pos // self.length, chunks - 1), chunks)
        total = lambda x: jnp.zeros((len(pos), chunks)).at[at].add(x, mode="drop")
        number = jnp.maximum(total(1.0)[at], 1.0)
        most = jnp.finfo(jnp.float32).max  # shares of numbers near it may add up to more
        mean = jnp.clip(total(jnp.where(counted, own / number, 0.0)), -most, most)
        return jnp.where(counted, mean[at], own)
