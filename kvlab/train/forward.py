"""The transformer with dense attention, which gradients pass through (prefill in blocks and decode are not made for that)."""

import jax.numpy as jnp

from kvlab import attention
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import Transformer, bind


def run(model: Transformer, tokens_BT, pos_T, ok_TS=True):
    """The last layer's output `[B, T, hidden]` of whole sequences.

    Args:
      pos_T: positions, which may repeat: a token sees those at its own position and before, itself included.
      ok_TS: narrows what a token may see further, such as to separate questions from one another.
    """
    config = model.config
    now_Q = jnp.repeat(pos_T, config.groups)[:, None]
    narrow_QS = ok_TS if ok_TS is True else jnp.repeat(ok_TS, config.groups, 0)

    def attend(layer, query, key, value, _):
        spec = config.attention(layer)
        return dense(query, key, value, spec.sees(pos_T, now_Q) & narrow_QS, spec)

    return model(tokens_BT, pos_T[None], attend)


def dense(query_BTHGD, key_BTHD, value_BTHD, ok_QS, spec: attention.AttentionSpec):
    """`attention.dense` in the model's own shapes; rows of `ok_QS` are tokens × query heads of a KV head."""
    B, T, H, G, D = query_BTHGD.shape
    query = jnp.moveaxis(query_BTHGD, 2, 1).reshape(B, H, T * G, D)
    key, value = jnp.swapaxes(key_BTHD, 1, 2), jnp.swapaxes(value_BTHD, 1, 2)
    out = attention.dense(query, key, value, ok_QS, spec)
    return jnp.moveaxis(out.reshape(B, H, T, G, D), 1, 2)


def sequential(config: ModelConfig, params, context_BT, query_BQ):
    """Logits `[B, Q, V]` after each query, asked one after another at the end of the context."""
    model = bind(config, params)
    tokens = jnp.concatenate([context_BT, query_BQ], 1)
    x = run(model, tokens, jnp.arange(tokens.shape[1]))
    return model.logits(x[:, context_BT.shape[1] :])


def apart(config: ModelConfig, params, context_BT, query_BQ):
    """Logits `[B, Q, V]` after each query, asked as if it alone followed the context: what decoding from a cache computes."""
    model = bind(config, params)
    T, Q = context_BT.shape[1], query_BQ.shape[1]
    index = jnp.arange(T + Q)
    ok_TS = (index < T) | (index == index[:, None])
    x = run(model, jnp.concatenate([context_BT, query_BQ], 1), jnp.minimum(index, T), ok_TS)
    return model.logits(x[:, T:])
