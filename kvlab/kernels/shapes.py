"""Shapes that tests and measurements share, and filled caches of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.core import EMPTY, PAGE, Cache, Record
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer's cache and one token's queries.

    Attributes:
      lengths: tokens of each row's prompt; a row of 0 has nothing to read.
      room: tokens that the cache may grow to.
    """

    lengths: tuple[int, ...]
    room: int
    kv_heads: int
    groups: int
    head_dim: int

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def policy(self, policy: Policy) -> Policy:
        """The policy bound to heads of this size."""
        heads = self.kv_heads * self.groups
        model = ModelConfig(1, 64, 64, heads, self.kv_heads, self.head_dim, vocab=64, context=max(self.room, PAGE))
        return policy.at(0, model)


SMALL = {  # of real heads, each with rows that are ragged: for interpret mode
    "64": Shape((150, 70, 0), 192, 2, 3, 64),
    "80": Shape((130, 1), 192, 1, 1, 80),
    "128": Shape((256, 70), 256, 1, 4, 128),
    "256": Shape((100, 128), 128, 1, 2, 256),
}


def filled(shape: Shape, policy: Policy, seed: int = 0) -> tuple[Cache, jax.Array, jax.Array]:
    """A cache of normal keys and values under a bound policy, queries `[B, H, G, D]`, and where they stand, `[B]`."""
    B, H, D = shape.batch, shape.kv_heads, shape.head_dim
    T = -(-max(shape.lengths) // PAGE) * PAGE
    rng, length = np.random.default_rng(seed), np.array(shape.lengths)
    draw = lambda *size: rng.standard_normal(size, np.float32)
    pos = np.where(np.arange(T) < length[:, None], np.arange(T), EMPTY).astype(np.int32)
    record = Record(draw(B, H, T, D), draw(B, H, T, D), pos)
    cache = jax.jit(type(policy).fill, static_argnums=2)(policy, record, policy.budget(T, shape.room))
    return cache, jnp.asarray(draw(B, H, shape.groups, D)), jnp.asarray(np.maximum(length - 1, 0), jnp.int32)
