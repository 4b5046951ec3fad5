"""The Spatial Gating Module: cosine of low-rank projections of query and key, under 5,000 parameters for a whole model."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from kvlab.attention import rotary, rotate
from kvlab.core import part, static
from kvlab.gates.base import Gate, GateConfig, GateParam

NARROW = 32  # channels; every one is a term of the compiled loop
EPS = 1e-6  # inside the square root, so that neither a zero vector nor its gradient is NaN


def unit(x):
    """x / ‖x‖ in float32; a vector of zeros stays one."""
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)


def same(x):
    return x


def match(query, index, widen=same):
    """Inner products of queries `[..., R]` and index keys `[..., X, R]`, as `[..., X]`; `widen` makes stored ones float32.

    Narrow ones are added up channel by channel: XLA then reads 16 or 8 bits where they lie, and makes no widened copy.
    """
    if index.shape[-1] > NARROW or widen is same:
        return jnp.einsum("...r,...xr->...x", query, widen(index))
    return sum(query[..., r, None] * widen(index[..., r]) for r in range(index.shape[-1]))


def plain(x, pos, frequency):
    """The vector before its rotary embedding at `pos`; as it is where `frequency` is None."""
    x = x.astype(jnp.float32)
    if frequency is None:
        return x
    cos, sin = rotary(pos, frequency)
    return rotate(x, cos, -sin)


@part
class SpatialLayer:
    """The gate of one layer: what selections and training call.

        k̂ = unit(a ⊙ W (c ⊙ k))        q̂ = unit(a ⊙ U (c ⊙ q))        score(q, k) = e^t · q̂·k̂

    `query_DR` and `key_DR` hold U and W times the layer's channel weights c.

    Over the query heads of a KV head either the scores are averaged (`pool = "mean"`: one product per key) or the
    distributions over keys that they make are (`"softmax"`: the logarithm of their mean).
    """

    query_DR: Any
    key_DR: Any
    scale_R: Any
    heat_H: Any
    threshold_H: Any = None
    frequency: Any = None
    lift_RE: Any = None
    pool: str = static(default="mean")

    def index(self, key_BHXD, pos):
        """Index keys `[B, H, X, width]`, of length 1; `pos` broadcasts to `[B, H, X]`."""
        return self._project(plain(key_BHXD, pos, self.frequency), self.key_DR)

    def scores(self, query_BHGD, index_BHXR, visible_BHX, now_BH, widen=same):
        """Float `[B, H, X]` of G query heads together, at positions `now`; `widen` makes stored index keys float32."""
        query, heat = self.queries(query_BHGD, now_BH), jnp.exp(self.heat_H)[:, None]
        if self.pool == "mean":
            return heat * match(query[..., 0, :], index_BHXR, widen)
        scores = heat[..., None] * match(query, index_BHXR[:, :, None], widen)
        scores = jnp.where(visible_BHX[:, :, None], scores, -1e30)
        scores = nn.log_softmax(scores, -1)
        return nn.logsumexp(scores, -2) - math.log(query.shape[-2])

    def queries(self, query_BHGD, now_BH):
        """What meets index keys, `[B, H, Q, width]`: one vector where scores are averaged, else one for each query head."""
        query = self._project(plain(query_BHGD, now_BH[..., None], self.frequency), self.query_DR)
        return query.mean(-2, keepdims=True) if self.pool == "mean" else query

    def _project(self, x, weight_DR):
        x = unit((x @ weight_DR) * self.scale_R)
        return x if self.lift_RE is None else x @ self.lift_RE


class SpatialGate(Gate):
    """Parameters of the Spatial Gating Module for every layer of a model.

    A projection `[D, r]` shared by all layers and heads; per layer a weight for each pair of channels that a rotary embedding
    turns (for each few neighbours among wide heads') and a scale `[r]`; a temperature per layer and KV head. At r = 16 that is
    4,864 for 32 layers of 8 KV heads of 128. Queries and keys have one projection (`tied`) or two that start equal, so that
    untrained scores estimate their cosine. Without channel weights layers that match single tokens are read badly: see
    experiments/LOG.md.
    """

    kind = "spatial"

    def __init__(self, config: GateConfig, seed: int = 0):
        super().__init__(config)
        start = np.random.default_rng([3, seed]).standard_normal((config.head_dim, config.rank)) / math.sqrt(config.head_dim)
        self.key = GateParam(jnp.asarray(start, jnp.float32))
        if not config.tied:
            self.query = GateParam(jnp.asarray(start, jnp.float32))
        if config.channels:
            self.channels = GateParam(jnp.ones((config.layers, min(config.channels, config.head_dim // 2))))
        self.scale = GateParam(jnp.ones((config.layers, config.rank)))
        self.heat = GateParam(jnp.full((config.layers, config.kv_heads), math.log(10.0)))
        if config.threshold:
            self.threshold = GateParam(jnp.zeros((config.layers, config.kv_heads)))

    @property
    def width(self) -> int:
        return self.config.lift or self.config.rank

    def layer(self, number, frequency=None) -> SpatialLayer:
        c = self.config
        query, key = (self.key if c.tied else self.query)[...], self.key[...]
        if c.channels:
            pairs = jnp.repeat(self.channels[number], c.head_dim // 2 // self.channels.shape[1])
            weight = jnp.tile(pairs, 2)[:, None]  # a pair is (i, i + D/2)
            query, key = weight * query, weight * key
        return SpatialLayer(
            query, key, self.scale[number], self.heat[number],
            self.threshold[number] if c.threshold else None, frequency, orthonormal(c.rank, c.lift), c.pool,
        )  # fmt: skip


def orthonormal(rank: int, wide: int):
    """Fixed orthonormal rows `[rank, wide]`, which leave every cosine as it is; None for `wide` 0."""
    if not wide:
        return None
    return jnp.asarray(np.linalg.qr(np.random.default_rng(4).standard_normal((wide, rank)))[0].T, jnp.float32)
