"""The lightning indexer of DeepSeek-V3.2: a few small index heads, ReLU and a weighted sum."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.core import part
from kvlab.gates.base import Gate, GateConfig, GateParam
from kvlab.gates.spatial import plain, same, unit


@part
class LightningLayer:
    """The indexer of one layer.

        score(q, k) = Σ_g Σ_j w_j · ReLU(U_j q_g · k̂)        k̂ = unit(W k)

    https://arxiv.org/abs/2512.02556, eq. 1, with queries and keys as input instead of hidden states.
    """

    query_NDR: Any
    key_DR: Any
    weight_HN: Any
    threshold_H: Any = None
    frequency: Any = None

    def index(self, key_BHXD, pos):
        """Index keys `[B, H, X, width]`, of length 1."""
        return unit(plain(key_BHXD, pos, self.frequency) @ self.key_DR)

    def scores(self, query_BHGD, index_BHXR, visible_BHX, now_BH, widen=same):
        """Float `[B, H, X]` of G query heads together, at positions `now`; `widen` makes stored index keys float32."""
        query = plain(query_BHGD, now_BH[..., None], self.frequency)
        heads = jnp.einsum("bhgd,ndr->bhgnr", query, self.query_NDR)
        match = jax.nn.relu(jnp.einsum("bhgnr,bhxr->bhgnx", heads, widen(index_BHXR)))
        return jnp.einsum("hn,bhgnx->bhx", self.weight_HN, match)


class LightningIndexer(Gate):
    """Parameters of the indexer for every layer: key and query projections per layer, weights per KV head."""

    kind = "lightning"

    def __init__(self, config: GateConfig, seed: int = 0):
        super().__init__(config)
        rng = np.random.default_rng([5, seed])
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / math.sqrt(config.head_dim), jnp.float32)
        L, D, r, n = config.layers, config.head_dim, config.rank, config.index_heads
        self.query, self.key = GateParam(draw(L, n, D, r)), GateParam(draw(L, D, r))
        self.weight = GateParam(jnp.full((L, config.kv_heads, n), 1.0 / n))
        if config.threshold:
            self.threshold = GateParam(jnp.zeros((L, config.kv_heads)))

    @property
    def width(self) -> int:
        return self.config.rank

    def layer(self, number, frequency=None) -> LightningLayer:
        threshold = self.threshold[number] if self.config.threshold else None
        return LightningLayer(self.query[number], self.key[number], self.weight[number], threshold, frequency)
