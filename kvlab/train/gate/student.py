"""The model reading what a gate picks after a prefilled context, with gradients; and the same model reading everything."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import attention
from kvlab.attention import AttentionSpec
from kvlab.gates import losses
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind
from kvlab.selection.gated import Gated
from kvlab.train.gate import picking


class Reading(NamedTuple):
    """How a sequence is read: "hard", "straight_through" or "soft", at which sparsity, the sigmoid's width, and whether the
    gate's inputs pass gradients."""

    mode: str
    sparsity: Any
    width: float = 1.0
    detach: bool = True


class Seen(NamedTuple):
    """Of the gated layers, each a mean: the gate's KL to the layer's attention, attention read, share of tokens read."""

    divergence: Any
    recall: Any
    share: Any


def prefill(config: ModelConfig, params, tokens_BS, frozen: bool = True) -> list[tuple]:
    """Keys and values `[B, S, H, D]` of each layer over a sequence that is read densely; faster where `frozen`, without
    gradients."""
    B, S = tokens_BS.shape
    now, kept = jnp.arange(S), []
    block = min(S & -S, 512)

    def attend(layer, query, key, value, _):
        kept.append((key, value))
        spec = config.attention(layer)
        if not frozen:
            return _dense(query, key, value, now, spec)
        return attention.prefill(query, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), spec, block, block)

    if not S:
        nothing = jnp.zeros((B, 0, config.kv_heads, config.head_dim))
        return [(nothing, nothing)] * config.layers
    bind(config, params)(tokens_BS, now[None], attend)
    return kept


def run(config: ModelConfig, params, gate, selection: Gated | None, how: Reading, past, tokens_BT):
    """Logits `[B, T, V]` of the tokens that follow `past` (`prefill`'s), and `Seen`; without a selection every layer reads
    all, and `Seen` is None."""
    model = bind(config, params)
    begin, seen = past[0][0].shape[1], []
    now = begin + jnp.arange(tokens_BT.shape[1])

    def attend(layer, query, key, value, _):
        spec = config.attention(layer)
        key, value = (jnp.concatenate(pair, 1) for pair in zip(past[layer], (key, value)))
        if selection is None or spec.window is not None:
            return _dense(query, key, value, now, spec)
        out, figures = _gated(dataclasses.replace(selection, layer=gate.at(layer, config)), how, spec, query, key, value)
        seen.append(figures)
        return out

    x = model(tokens_BT, now[None], attend)
    return model.logits(x), Seen(*map(jnp.mean, map(jnp.stack, zip(*seen)))) if seen else None


@functools.partial(jax.checkpoint, static_argnums=4)
def _dense(query, key, value, now_T, spec: AttentionSpec):
    ok = spec.sees(jnp.arange(key.shape[1]), now_T[:, None])
    logits = spec.cap(jnp.einsum("bqhgd,bthd->bhgqt", query, key) * spec.scale)
    weights = jax.nn.softmax(jnp.where(ok, logits, losses.HIDDEN), -1)
    return jnp.einsum("bhgqt,bthd->bqhgd", weights, value)


def _gated(selection: Gated, how: Reading, spec: AttentionSpec, query, key, value):
    """Attention over what is picked. `how.sparsity` and the gate are arrays; the rest is static."""
    inner = functools.partial(_picked, spec, how.mode, how.width, how.detach)
    return jax.checkpoint(inner)(selection, how.sparsity, query, key, value)


def _picked(spec, mode: str, width: float, detach: bool, selection, sparsity, query_BTHGD, key_BXHD, value_BXHD):
    B, T = query_BTHGD.shape[:2]
    key = jnp.swapaxes(key_BXHD, 1, 2)
    inputs = lax.stop_gradient((query_BTHGD, key)) if detach else (query_BTHGD, key)
    now = jnp.broadcast_to(jnp.arange(key.shape[2] - T, key.shape[2]), (B, T))
    score, ok = picking.scores(selection, inputs[0] * spec.scale, inputs[1], now)
    hard = picking.hard(selection, lax.stop_gradient(score), ok, sparsity)
    mask = hard.astype(jnp.float32)
    if mode != "hard":
        smooth = picking.soft(selection, score, ok, hard, width)
        mask = smooth if mode == "soft" else picking.straight_through(mask, smooth)
    logits = spec.cap(jnp.einsum("bqhgd,bhtd->bhgqt", query_BTHGD, key) * spec.scale)
    logits = jnp.where(ok[:, :, None], logits, losses.HIDDEN)
    weights = jnp.exp(logits - lax.stop_gradient(logits.max(-1, keepdims=True))) * mask[:, :, None]
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
    out = jnp.einsum("bhgqt,bthd->bqhgd", weights, value_BXHD)
    teacher = lax.stop_gradient(jax.nn.softmax(logits, -1).mean(2))
    share = (mask.sum(-1) / ok.sum(-1)).mean()
    return out, (losses.divergence(teacher, score, ok), losses.recall(teacher, hard), share)
