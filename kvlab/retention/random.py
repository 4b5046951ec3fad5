"""What every rule has to beat."""

import jax.numpy as jnp

from kvlab.core import part
from kvlab.hashing import mixed
from kvlab.retention.sized import Sized


@part
class Random(Sized):
    """Keeps tokens drawn at random: a control. A token's draw depends on its position, the KV head and `seed`, on no batch.

        priority(pos, head) = hash(pos + hash(257·head + seed)), 24 bits of it

    The same draws hold while decoding, so an old token that was kept among many stays until too many luckier ones have come.
    """

    seed: int = 0

    def priority(self, state, pos, now):
        head = jnp.arange(pos.shape[1])[:, None] * 257 + self.seed
        x = mixed(pos.astype(jnp.uint32) + mixed(head.astype(jnp.uint32)))
        return (x >> 8).astype(jnp.float32)
