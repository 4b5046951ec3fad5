"""Symmetric 8-bit integers."""

import jax.numpy as jnp

from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError, nearest

SCALES = ("token", "channel")


@part
class Int8(Codec):
    """x ≈ s·q with q in −127 … 127 and s = max|x| / 127, over a token or over a channel of a page of 64 tokens.

    Keys have channels of very unequal size, so a scale per channel suits them and one per token suits values: KIVI,
    https://arxiv.org/abs/2402.02750, section 3. The error is at most s/2 in every coordinate.
    """

    scale: str = static(default="token")

    def __post_init__(self):
        if self.scale not in SCALES:
            raise ConfigError(f"int8 codec: scale={self.scale!r}; {nearest(str(self.scale), SCALES)}")

    @property
    def group(self) -> int:
        return PAGE if self.scale == "channel" else 1

    def encode(self, x_BHNPD, pos_BHNP=None):
        axis = -2 if self.scale == "channel" else -1
        x = x_BHNPD.astype(jnp.float32)
        scale = jnp.abs(x).max(axis, keepdims=True) / 127
        q = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
        return {"x": jnp.clip(q, -127, 127).astype(jnp.int8), "scale": scale}

    def decode(self, code, pos_BHNP=None):
        return code["x"].astype(jnp.float32) * code["scale"]

    def page_bytes(self, dim: int) -> int:
        return PAGE * dim + 4 * (dim if self.scale == "channel" else PAGE)
