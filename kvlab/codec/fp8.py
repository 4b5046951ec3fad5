"""Floating-point numbers of 8 bits."""

import jax
import jax.numpy as jnp

from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError, nearest

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
AXES = {"token": -1, "channel": -2, "none": None}


@part
class Fp8(Codec):
    """x ≈ s·f with f in e4m3 (±448) or e5m2 (±57344), https://arxiv.org/abs/2209.05433, and s = max|x| / the largest f.

    s is taken over a token or over a channel of a page; `scale="none"` has s = 1 and saturates. The error is at most
    2^−4 |x| in e4m3 and 2^−3 |x| in e5m2; near zero it is at most s·2^−10 and s·2^−17. What is stored is always finite.
    Codes are held as bit patterns (uint8), or XLA on the CPU would widen the whole cache. A page takes 64·D bytes and 4
    for each scale.
    """

    format: str = static(default="e4m3")
    scale: str = static(default="token")

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ConfigError(f"fp8 codec: format={self.format!r}; {nearest(str(self.format), FORMATS)}")
        if self.scale not in AXES:
            raise ConfigError(f"fp8 codec: scale={self.scale!r}; {nearest(str(self.scale), AXES)}")

    @property
    def group(self) -> int:
        return PAGE if self.scale == "channel" else 1

    @property
    def largest(self) -> float:
        return float(jnp.finfo(FORMATS[self.format]).max)

    def encode(self, x_BHNPD, pos_BHNP=None):
        x, code = x_BHNPD.astype(jnp.float32), {}
        if self.scale != "none":
            most = jnp.abs(x).max(AXES[self.scale], keepdims=True)
            code["scale"] = jnp.minimum(most, 2.0**127) / self.largest  # so that their product is finite
            x = x / jnp.where(code["scale"] > 0, code["scale"], 1.0)
        x = jnp.clip(x, -self.largest, self.largest).astype(FORMATS[self.format])
        return {"x": jax.lax.bitcast_convert_type(x, jnp.uint8), **code}

    def decode(self, code, pos_BHNP=None):
        x = jax.lax.bitcast_convert_type(code["x"], FORMATS[self.format]).astype(jnp.float32)
        return x if self.scale == "none" else x * code["scale"]

    def page_bytes(self, dim: int) -> int:
        return PAGE * dim + 4 * {"token": PAGE, "channel": dim, "none": 0}[self.scale]
