"""What a gate learns from: the attention of the model that it serves."""

import jax
import jax.numpy as jnp
from jax import nn

HIDDEN = -1e30  # finite, so that gradients are


def attention(query_BQHGD, key_BHTD, ok_BHQT, spec):
    """The teacher `[B, H, Q, T]`: attention averaged over the query heads of a KV head.

    The denominator runs over every visible token, sinks and recent ones included, as the model's own does.
    """
    logits = spec.cap(jnp.einsum("bqhgd,bhtd->bhgqt", query_BQHGD, key_BHTD) * spec.scale)
    return nn.softmax(jnp.where(ok_BHQT[:, :, None], logits, HIDDEN), -1).mean(2)


def divergence(teacher_BHQT, score_BHQT, ok_BHQT):
    """KL(teacher ‖ softmax of scores), summed over keys, mean over queries and heads, in nats."""
    log_gate = nn.log_softmax(jnp.where(ok_BHQT, score_BHQT, HIDDEN), -1)
    held = jnp.where(ok_BHQT, teacher_BHQT, 0.0)
    return (jax.scipy.special.xlogy(held, held) - held * jnp.where(ok_BHQT, log_gate, 0.0)).sum(-1).mean()


def recall(teacher_BHQT, picked_BHQT):
    """Share of the teacher's attention that falls on what was picked, mean over queries and heads."""
    return jnp.where(picked_BHQT, teacher_BHQT, 0.0).sum(-1).mean()
