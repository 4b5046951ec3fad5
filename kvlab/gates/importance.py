"""The importance gate: from what a token is to how much later tokens will need it, before any of them is known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.core import part
from kvlab.errors import ConfigError
from kvlab.gates.base import Gate, GateParam

EPS = 1e-6


def rms(x):
    """x / rms(x) in float32; a vector of zeros stays one. Done twice it is as done once."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)


@dataclasses.dataclass(frozen=True)
class ImportanceConfig:
    """Shape of an importance gate.

    Attributes:
      layers, kv_heads, head_dim, hidden: the model's.
      width: hidden units beside the linear map, 0 for the linear map alone.
      vectors: whether the hidden units also see the token's own key and value in each head.
    """

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    width: int = 64
    vectors: bool = False

    def __post_init__(self):
        if self.width < 0 or (self.vectors and not self.width):
            raise ConfigError(
                f"gate: width={self.width}, vectors={self.vectors}; width: 0 (linear) or more, and at least 1 with vectors"
            )


@part
class ImportanceLayer:
    """The gate of one layer: log-importance from the layer's input x, for each KV head.

        x̂ = x / rms(x)        score_h(x) = s_h·x̂ + b_h + o_h · gelu(W x̂ + V [k̂_h, v̂_h] + c)

    Linear and two-layer maps from hidden states to a replay's importance: KVzap, https://arxiv.org/abs/2601.07891.
    """

    linear_EH: Any
    bias_H: Any
    in_EW: Any = None
    in_bias_W: Any = None
    out_WH: Any = None
    vectors_CW: Any = None

    def __call__(self, key, value, pos, hidden):
        """Float32 `[B, H, T]` from keys and values `[B, H, T, D]` and the layer's input `[B, 1, T, E]`."""
        x_BTE = rms(hidden)[:, 0]
        score_BTH = x_BTE @ self.linear_EH + self.bias_H
        if self.in_EW is not None:
            unit = x_BTE @ self.in_EW + self.in_bias_W
            if self.vectors_CW is None:
                score_BTH += jax.nn.gelu(unit) @ self.out_WH
            else:
                own = jnp.concatenate([rms(key), rms(value)], -1) @ self.vectors_CW
                score_BTH += jnp.einsum("bhtw,wh->bth", jax.nn.gelu(unit[:, None] + own), self.out_WH)
        return jnp.swapaxes(score_BTH, 1, 2)

    scores = __call__


class ImportanceGate(Gate):
    """Parameters of `ImportanceLayer` for every layer; untrained, it takes all tokens to be worth about the same."""

    kind = "importance"
    Config = ImportanceConfig

    def __init__(self, config: ImportanceConfig, seed: int = 0):
        super().__init__(config)
        rng = np.random.default_rng([6, seed])
        draw = lambda n, *shape: GateParam(jnp.asarray(rng.standard_normal((config.layers, n, *shape)) / n**0.5, jnp.float32))
        L, E, H, W = config.layers, config.hidden, config.kv_heads, config.width
        self.linear, self.bias = GateParam(jnp.zeros((L, E, H))), GateParam(jnp.zeros((L, H)))
        if W:
            self.inward, self.inward_bias, self.outward = draw(E, W), GateParam(jnp.zeros((L, W))), draw(W, H)
        if config.vectors:
            self.vectors = draw(2 * config.head_dim, W)

    def layer(self, number: int, frequency=None) -> ImportanceLayer:
        return jax.tree.map(lambda x: x[number], self.stacked())

    def stacked(self) -> ImportanceLayer:
        """All layers' parts in one, with an axis for layers first: what training maps over."""
        c = self.config
        deep = (self.inward[...], self.inward_bias[...], self.outward[...]) if c.width else ()
        return ImportanceLayer(
            self.linear[...], self.bias[...], *deep, **({"vectors_CW": self.vectors[...]} if c.vectors else {})
        )

    def at(self, number: int, model) -> ImportanceLayer:
        c = self.config
        if c.hidden != model.hidden:
            raise ConfigError(f"gate for hidden states of {c.hidden}; the model's have {model.hidden}; use a gate trained for it")
        self.check(model)
        return self.layer(number)
