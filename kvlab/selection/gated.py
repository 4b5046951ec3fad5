"""A learned gate says what is read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvlab import gates
from kvlab.codec import Raw
from kvlab.core import NO_BOUND, PAGE, part, static
from kvlab.errors import ConfigError, nearest
from kvlab.gates.spatial import SpatialLayer
from kvlab.kernels import gate as kernel
from kvlab.selection.top import Top

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
NORMS = ("none", "softmax", "tempered")
MODES = ("top_k", "threshold")


@part
class Gated(Top):
    """Reads what a trained gate scores highest; index keys, of length 1, lie beside the cache and count in its bytes.

    Fields, besides those of `Top`:
      gate: the name of a gate that ships, or the path of one that `kvlab train` saved.
      dtype: of the index keys: float32, float16, bfloat16 or int8 (127 steps of a number that is at most 1).
      window_norm: "none"; "softmax", scores normalised inside windows of 64 tokens before the best of all are taken, as in
        the HySparse article; "tempered", where windows keep their mass to the power `alpha`.
      mode: "top_k", or "threshold": all that the gate scores above its trained threshold, whatever their number.
    """

    gate: str = static(default="")
    dtype: str = static(default="float16")
    window_norm: str = static(default="none")
    alpha: float = static(default=0.5)
    mode: str = static(default="top_k")
    layer: Any = None
    kind = ""

    def __post_init__(self):
        super().__post_init__()
        for name, allowed in (("dtype", DTYPES), ("window_norm", NORMS), ("mode", MODES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{self.kind}: {name}={getattr(self, name)!r}; {nearest(str(getattr(self, name)), allowed)}")
        if self.mode == "threshold" and self.granularity == "page":
            raise ConfigError(f'{self.kind}: mode = "threshold" picks tokens; write granularity = "token"')

    def at(self, layer, model, token_bytes):
        if self.layer is not None:
            return self
        gate = self._load()
        if gate.kind != self.kind:
            raise ConfigError(f"gate={self.gate!r} is of kind {gate.kind!r}, the selection wants {self.kind!r}; use another")
        if self.mode == "threshold" and not gate.config.threshold:
            raise ConfigError(f'gate={self.gate!r} was trained without thresholds; write mode = "top_k" or train it with them')
        return dataclasses.replace(super().at(layer, model, token_bytes), layer=gate.at(layer, model))

    def _load(self):
        if not self.gate:
            raise ConfigError(f'{self.kind}: no gate; write gate = "path/to/gate.safetensors", as kvlab train saves it')
        return gates.load(self.gate)

    def index_bytes(self, dim):
        return self._load().width * DTYPES[self.dtype]

    def start(self, key_BHNPD, pos_BHNP):
        B, H, N, P, D = key_BHNPD.shape
        index = self.layer.index(key_BHNPD.reshape(B, H, N * P, D), pos_BHNP.reshape(B, H, N * P))
        return self.pack(jnp.swapaxes(index, 2, 3))

    def write(self, state, page, offset, key_BHD, pos_B, fresh):
        new = self.pack(self.layer.index(key_BHD[:, :, None], pos_B[:, None, None])[:, :, 0])
        row, head = jnp.indices(page.shape, sparse=True)
        return state.at[row, head, :, page * PAGE + offset].set(new, mode="drop")

    def scores(self, state, query_BHQD, visible_BHNP, cache, around):
        B, H, N, P = visible_BHNP.shape
        now = self._now(visible_BHNP, cache)
        index, flat = jnp.swapaxes(state, 2, 3), visible_BHNP.reshape(B, H, N * P)
        scores = self.layer.scores(query_BHQD, index, flat, now, self.unpack)
        return windowed(scores.reshape(B, H, N, P), visible_BHNP, self.flattening)

    def page_scores(self, state, query_BHQD, visible_BHNP, cache, around):
        if around.implementation == "xla" or not isinstance(self.layer, SpatialLayer):
            return super().page_scores(state, query_BHQD, visible_BHNP, cache, around)
        queries = self.layer.queries(query_BHQD, self._now(visible_BHNP, cache)) * jnp.exp(self.layer.heat_H)[:, None, None]
        softmax = self.layer.pool == "softmax"
        return kernel.page_scores(state, queries, visible_BHNP, self.dtype, softmax, self.flattening, around.implementation)

    def _now(self, visible_BHNP, cache):
        """The newest visible position, `[B, H]`."""
        return jnp.where(visible_BHNP, cache.pos, -1).max((-1, -2))

    @property
    def flattening(self) -> float:
        """Share of a window's log mass that is taken off."""
        return {"none": 0.0, "softmax": 1.0, "tempered": 1 - self.alpha}[self.window_norm]

    def count(self, visible_BHNP):
        if self.mode == "top_k":
            return super().count(visible_BHNP)
        length = visible_BHNP.sum((-1, -2), dtype=jnp.int32)
        return length, jnp.full_like(length, NO_BOUND)

    def keep(self, score_BHX, ok_BHX, pos_BHX, number_BH):
        if self.mode == "top_k":
            return super().keep(score_BHX, ok_BHX, pos_BHX, number_BH)
        least = self.layer.threshold_H.reshape(-1, *(1,) * (score_BHX.ndim - 2))
        return ok_BHX & (self.forced(ok_BHX, pos_BHX, number_BH) | (score_BHX > least))

    def pack(self, index):
        """Index keys as they are stored; floating-point ones as the raw codec stores vectors."""
        if self.dtype == "int8":
            return jnp.round(index * 127).astype(jnp.int8)
        return Raw(self.dtype).encode(index)["x"]

    def unpack(self, stored):
        """Float32 index keys."""
        if self.dtype == "int8":
            return stored.astype(jnp.float32) / 127
        return Raw(self.dtype).decode({"x": stored})


def windowed(score_XNP, visible_XNP, flattening: float):
    """Scores less a share of their window's log mass: 0 leaves them, 1 is a softmax inside each window."""
    if not flattening:
        return score_XNP
    mass = jax.nn.logsumexp(jnp.where(visible_XNP, score_XNP, -1e30), -1, keepdims=True)
    return score_XNP - flattening * mass


@part
class HySparse(Gated):
    """Reading by the Spatial Gating Module of the HySparse article (`kvlab.gates.SpatialGate`)."""

    kind = "spatial"


@part
class Lightning(Gated):
    """Reading by a lightning indexer (`kvlab.gates.LightningIndexer`; https://arxiv.org/abs/2512.02556, section 2.1)."""

    kind = "lightning"
