"""The model reading what a gate picks, over whole sequences, with gradients; and the same model reading everything."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


def run(config: ModelConfig, params, gate, selection: Gated | None, how: Reading, tokens_BT, pos_BQ):
    """Logits `[B, Q, V]` at the positions, and `Seen`. Without a selection every layer reads all (and `Seen` is None)."""
    model = bind(config, params)
    seen = []

    def attend(layer, query, key, value, _):
        spec = config.attention(layer)
        if selection is None or spec.window is not None:
            return _dense(query, key, value, spec)
        out, figures = _gated(dataclasses.replace(selection, layer=gate.at(layer, config)), how, spec, query, key, value)
        seen.append(figures)
        return out

    x = model(tokens_BT, jnp.arange(tokens_BT.shape[1])[None], attend)
    logits = model.logits(jnp.take_along_axis(x, pos_BQ[..., None], 1))
    return logits, Seen(*map(jnp.mean, map(jnp.stack, zip(*seen)))) if seen else None


@functools.partial(jax.checkpoint, static_argnums=3)
def _dense(query, key, value, spec: AttentionSpec):
    T = query.shape[1]
    now = jnp.arange(T)
    ok = spec.sees(now, now[:, None])
    logits = spec.cap(jnp.einsum("bqhgd,bthd->bhgqt", query, key) * spec.scale)
    weights = jax.nn.softmax(jnp.where(ok, logits, losses.HIDDEN), -1)
    return jnp.einsum("bhgqt,bthd->bqhgd", weights, value)


def _gated(selection: Gated, how: Reading, spec: AttentionSpec, query, key, value):
    """Attention over what is picked. `how.sparsity` and the gate are arrays; the rest is static."""
    inner = functools.partial(_picked, spec, how.mode, how.width, how.detach)
    return jax.checkpoint(inner)(selection, how.sparsity, query, key, value)


def _picked(spec, mode: str, width: float, detach: bool, selection, sparsity, query_BTHGD, key_BTHD, value_BTHD):
    B, T = query_BTHGD.shape[:2]
    key = jnp.swapaxes(key_BTHD, 1, 2)
    inputs = lax.stop_gradient((query_BTHGD, key)) if detach else (query_BTHGD, key)
    now = jnp.broadcast_to(jnp.arange(T), (B, T))
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
    out = jnp.einsum("bhgqt,bthd->bqhgd", weights, value_BTHD)
    teacher = lax.stop_gradient(jax.nn.softmax(logits, -1).mean(2))
    share = (mask.sum(-1) / ok.sum(-1)).mean()
    return out, (losses.divergence(teacher, score, ok), losses.recall(teacher, hard), share)
