"""The model whose older keys fade as a gate decides: softly and with gradients, or by rank as the retention `dms` evicts.

https://arxiv.org/abs/2506.05345, section 3. A query at position i sees key t with log(1 − α_t) added to its logit once
i − t ≥ delay, and in full before that.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvlab.attention import MASKED, AttentionSpec
from kvlab.gates import ImportanceGate
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind


def run(config: ModelConfig, params, tokens_BT, gate: ImportanceGate | None = None, fade: Callable | None = None, delay: int = 1):
    """Logits `[B, T, V]`, and what `fade` gave in each layer that is gated; without a gate, the dense model and nothing.

    Args:
      fade: fade(layer, score `[B, H, T]`) is added to the logits of keys as old as `delay`: `[B, H, T, T]`, queries first, or
        `[B, H, 1, T]` where it is the same for every query.
    Layers with a local window keep it and are not gated, as while decoding.
    """
    model, found = bind(config, params), []

    def attend(layer, query, key, value, x):
        spec = config.attention(layer)
        if gate is None or fade is None or spec.window is not None:
            return _attend(query, key, value, jnp.zeros((1, 1, 1, 1)), spec, delay)
        score = gate.at(layer, config)(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), None, x[:, None])
        found.append(fade(layer, score))
        return _attend(query, key, value, found[-1], spec, delay)

    x = model(tokens_BT, jnp.arange(tokens_BT.shape[1])[None], attend)
    return model.logits(x), found


@functools.partial(jax.checkpoint, static_argnums=(4, 5))  # or all layers' weights, [T, T] a head, wait for the way back
def _attend(query_BTHGD, key_BTHD, value_BTHD, fade_BHQT, spec: AttentionSpec, delay: int):
    now = jnp.arange(key_BTHD.shape[1])
    logits = spec.cap(jnp.einsum("bqhgd,bthd->bhgqt", query_BTHGD, key_BTHD) * spec.scale)
    logits += jnp.where(now[:, None] - now >= delay, fade_BHQT, 0.0)[:, :, None]
    weights = jax.nn.softmax(jnp.where(spec.sees(now, now[:, None]), logits, MASKED), -1)
    return jnp.einsum("bhgqt,bthd->bqhgd", weights, value_BTHD)


def noisy(key, temperature: float) -> Callable:
    """Fades by log(1 − α), α = σ((e + noise) / temperature), with the eviction logit e = −score and logistic noise: the binary
    concrete distribution, https://arxiv.org/abs/1611.00712, appendix B."""

    def fade(layer, score_BHT):
        noise = jax.random.logistic(jax.random.fold_in(key, layer), score_BHT.shape)
        return jax.nn.log_sigmoid((score_BHT - noise) / temperature)[:, :, None]

    return fade


def ranked(budget, delay: int) -> Callable:
    """Hides from each query what `dms` has evicted by then, where it stores `budget` tokens of a stream: all but the `delay`
    newest and, of those before, the ones of highest score; among equals the newest."""

    def fade(layer, score_BHT):
        now = jnp.arange(score_BHT.shape[-1])
        one, other = score_BHT[..., :, None], score_BHT[..., None, :]
        better_BHST = (one > other) | ((one == other) & (now[:, None] > now))
        old_QS = now[:, None] - now >= delay
        ahead = jnp.einsum("qs,bhst->bhqt", old_QS.astype(jnp.float32), better_BHST.astype(jnp.float32))
        return jnp.where(ahead < budget - delay, 0.0, MASKED)

    return fade
