"""Symmetric 8-bit integers."""

import jax.numpy as jnp

from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError, nearest

AXES: dict[str, int | tuple[int, int]] = {"token": -1, "channel": -2, "tensor": (-2, -1)}  # what a scale is taken over


@part
class Int8(Codec):
    """x ≈ s·q with q in −127 … 127 and s = max|x| / 127, over a token, over a channel of a page of 64 tokens or over a page.

    Keys have channels of very unequal size, so a scale per channel suits them and one per token suits values: KIVI,
    https://arxiv.org/abs/2402.02750, section 3. `scale="tensor"` is the control without either, one scale for a page of a
    KV head. The error is at most s/2 in every coordinate. A page takes 64·D bytes and 4 for each of its 64, D or 1 scales.
    """

    scale: str = static(default="token")

    def __post_init__(self):
        if self.scale not in AXES:
            raise ConfigError(f"int8 codec: scale={self.scale!r}; {nearest(str(self.scale), AXES)}")

    @property
    def group(self) -> int:
        return 1 if self.scale == "token" else PAGE

    def encode(self, x_BHNPD, pos_BHNP=None):
        x = x_BHNPD.astype(jnp.float32)
        scale = jnp.abs(x).max(AXES[self.scale], keepdims=True) / 127
        q = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
        return {"x": jnp.clip(q, -127, 127).astype(jnp.int8), "scale": scale}

    def decode(self, code, pos_BHNP=None):
        return code["x"].astype(jnp.float32) * code["scale"]

    def page_bytes(self, dim: int) -> int:
        return PAGE * dim + 4 * {"token": PAGE, "channel": dim, "tensor": 1}[self.scale]
