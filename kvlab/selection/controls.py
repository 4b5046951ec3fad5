"""What every learned or clever selection has to beat, and what none can."""

import jax.numpy as jnp
from jax import nn

from kvlab.core import part
from kvlab.hashing import mixed
from kvlab.selection.top import Top


@part
class Random(Top):
    """Tokens drawn anew for every query: a hash of position, time, KV head and `seed`."""

    seed: int = 0

    def scores(self, state, query, visible, cache, around):
        now = jnp.where(visible, cache.pos, -1).max((-1, -2), keepdims=True)
        head = jnp.arange(visible.shape[1])[:, None, None]
        x = mixed(cache.pos.astype(jnp.uint32) + mixed((now * 65_537 + head * 257 + self.seed).astype(jnp.uint32)))
        return (x >> 8).astype(jnp.float32)


@part
class Recency(Top):
    """The newest tokens."""

    def scores(self, state, query, visible, cache, around):
        return cache.pos.astype(jnp.float32)


@part
class KeyNorm(Top):
    """Tokens whose keys are shortest, whatever the query (https://arxiv.org/abs/2406.11430, section 3)."""

    def index_bytes(self, dim):
        return 4

    def start(self, key_BHNPD, pos_BHNP):
        return jnp.linalg.norm(key_BHNPD, axis=-1)

    def write(self, state, page, offset, key_BHD, pos_B, fresh):
        row, head = jnp.indices(page.shape, sparse=True)
        return state.at[row, head, page, offset].set(jnp.linalg.norm(key_BHD, axis=-1), mode="drop")

    def scores(self, state, query, visible, cache, around):
        return -state


@part
class Oracle(Top):
    """The tokens that get most attention, averaged over the query heads of a KV head. Reads every key to know them.

    No selection of as many tokens covers more of the attention, so it bounds all others from above.
    """

    def index_bytes(self, dim):
        return 0  # what it reads to know is not counted: it is a bound, not a method

    def scores(self, state, query, visible, cache, around):
        return attention(around.logits(), visible)


def attention(logits_BHQNP, visible_BHNP):
    """Attention `[B, H, N, P]` averaged over queries, over everything visible."""
    flat = jnp.where(visible_BHNP[:, :, None], logits_BHQNP, -1e30)
    weights = nn.softmax(flat.reshape(*flat.shape[:3], -1), -1).mean(2)
    return weights.reshape(visible_BHNP.shape)
