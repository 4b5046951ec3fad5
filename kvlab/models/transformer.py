"""The decoder as Flax modules that hold parameters and nothing else: no cache, no mode, no hidden state.

A layer is used in two halves, with attention between them, so prefill and decode differ only in what stands there:

    q, k, v = block.project(x, cos, sin)   →   attend(layer, q, k, v, x)   →   x = block.finish(x, mixed)

Weights lie as `[out, in]`, as checkpoints store them.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from kvlab.attention import rotary, rotate
from kvlab.models.config import ModelConfig, Rope

ACTIVATIONS: dict[str, Callable] = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
ROWS = 512  # tokens of a prompt in the feed-forward network at a time


def linear(weight_OI, x):
    """`x [..., in]` times a weight `[out, in]`.

    The three forms are the same product. XLA's CPU backend compiles each to other code: a matrix–vector product for one
    row, a fused multiply and sum for a few (it reads each weight once), a matrix product for many.
    """
    if x.ndim > 2:
        return x @ weight_OI.T
    if 1 < x.shape[0] <= 8:
        return jax.lax.optimization_barrier((weight_OI[:, None] * x).sum(-1)).T
    return (weight_OI @ x.T).T


def by_rows(f, x):
    """`f` over tokens `x [..., hidden]`, ROWS at a time, so that its wide intermediates stay in a core's cache."""
    count = x.size // x.shape[-1]
    if count <= ROWS or count % ROWS:
        return f(x)
    return jax.lax.map(f, x.reshape(-1, 1, ROWS, x.shape[-1])).reshape(x.shape)


class Weight(nnx.Param):
    """A parameter of the model (a gate's will have a type of its own)."""


def _empty(*shape):
    return Weight(jax.ShapeDtypeStruct(shape, jnp.float32))


class RMSNorm(nnx.Module):
    """x / rms(x) · scale (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.scale = _empty(dim)

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * self.scale[...]


class Block(nnx.Module):
    """One layer: attention's projections and a gated feed-forward network, with what the family adds to them.

    A part that the configuration does not ask for does not exist, so it costs nothing.
    """

    def __init__(self, config: ModelConfig):
        width = config.head_dim
        rows = (config.heads + 2 * config.kv_heads) * width
        self.config = config
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = _empty(rows, config.hidden)
        if config.qkv_bias:
            self.qkv_bias = _empty(rows)
        if config.qk_norm:
            self.query_norm = RMSNorm(width, config.norm_eps)
            self.key_norm = RMSNorm(width, config.norm_eps)
        self.out = _empty(config.hidden, config.heads * width)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = _empty(2 * config.ffn, config.hidden)
        self.down = _empty(config.hidden, config.ffn)
        if config.post_norms:
            self.attention_post_norm = RMSNorm(config.hidden, config.norm_eps)
            self.ffn_post_norm = RMSNorm(config.hidden, config.norm_eps)

    def project(self, x, cos, sin):
        """Rotated queries `[..., H, G, D]` and keys `[..., H, D]`, and values, from `x [..., hidden]`.

        `cos` and `sin`, `[..., D/2]`, are `Transformer.rotary` of the tokens' positions.
        """
        c = self.config
        qkv = linear(self.qkv[...], self.attention_norm(x))
        if c.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        qkv = qkv.reshape(*x.shape[:-1], -1, c.head_dim)
        turning = qkv[..., : c.heads + c.kv_heads, :]
        if c.qk_norm:
            query, key = turning[..., : c.heads, :], turning[..., c.heads :, :]
            turning = jnp.concatenate([self.query_norm(query), self.key_norm(key)], -2)
        rotated = rotate(turning, cos[..., None, :], sin[..., None, :])
        query = rotated[..., : c.heads, :].reshape(*x.shape[:-1], c.kv_heads, c.groups, c.head_dim)
        return query, rotated[..., c.heads :, :], qkv[..., c.heads + c.kv_heads :, :]

    def finish(self, x, mixed):
        """The layer's output from its input and attention's output `[..., H, G, D]`."""
        mixed = linear(self.out[...], mixed.reshape(*x.shape[:-1], -1))
        if self.config.post_norms:
            mixed = self.attention_post_norm(mixed)
        return by_rows(self._feed, x + mixed)

    def _feed(self, x):
        gate, up = jnp.split(linear(self.gate_up[...], self.ffn_norm(x)), 2, -1)
        fed = linear(self.down[...], ACTIVATIONS[self.config.activation](gate) * up)
        return x + (self.ffn_post_norm(fed) if self.config.post_norms else fed)


class Transformer(nnx.Module):
    """A decoder-only transformer (Llama, https://arxiv.org/abs/2302.13971); `kvlab.models.families` says which others."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embedding = _empty(config.vocab, config.hidden)
        self.blocks = nnx.List([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.head = _empty(config.vocab, config.hidden)

    def rotary(self, pos) -> dict[Rope, tuple]:
        """Cosines and sines for tokens at these positions, once for each rotary embedding that the layers use."""
        ropes = dict.fromkeys(self.config.rope(layer) for layer in range(self.config.layers))
        return {rope: rotary(pos, rope.frequencies(self.config.head_dim)) for rope in ropes}

    def __call__(self, tokens, pos, attend):
        """The last layer's output `[..., hidden]` for tokens at positions `pos`, which broadcast to the tokens' shape.

        attend(layer, query [..., H, G, D], key [..., H, D], value [..., H, D], x [..., hidden]) gives attention's output
        `[..., H, G, D]`: over a prompt or over a cache, which is all that prefill, decode and training differ in. `x` is the
        layer's input, before its norm.
        """
        x = self.embedding[...][tokens]
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        turns = self.rotary(pos)
        for layer, block in enumerate(self.blocks):
            x = block.finish(x, attend(layer, *block.project(x, *turns[self.config.rope(layer)]), x))
        return x

    def logits(self, x):
        """Next-token logits `[B, V]` from the last layer's output `[B, hidden]`."""
        logits = linear((self.embedding if self.config.tied else self.head)[...], self.norm(x))
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@functools.cache
def skeleton(config: ModelConfig):
    """The module's structure without values."""
    return nnx.split(Transformer(config))


def bind(config: ModelConfig, params: dict) -> Transformer:
    """The module over a pure dict of arrays (see `kvlab.models.load`); free under jit, where it only names them."""
    graph, state = skeleton(config)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def init(config: ModelConfig, seed: int) -> dict:
    """Random parameters, for tests and for models of our own; biases are zero."""
    shapes = nnx.to_pure_dict(skeleton(config)[1])
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(key, path, leaf):
        if leaf.ndim == 1:
            return jnp.zeros(leaf.shape) if "bias" in str(path[-1]) else jnp.ones(leaf.shape)
        return jax.random.normal(key, leaf.shape) * leaf.shape[-1] ** -0.5

    return jax.tree.unflatten(tree, [draw(k, path, x) for k, (path, x) in zip(keys, leaves)])
