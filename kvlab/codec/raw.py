"""Vectors as they are, in 32 or 16 bits."""

import jax
import jax.numpy as jnp

from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError, nearest

DTYPES = ("float32", "float16", "bfloat16")


@part
class Raw(Codec):
    """No compression: float32, float16 or bfloat16 numbers.

    16-bit numbers are held as their bit patterns (uint16) and widened one block at a time: given 16-bit floats, XLA on
    the CPU makes a float32 copy of the whole cache at every step.
    """

    dtype: str = static(default="float32")

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ConfigError(f"raw codec: dtype={self.dtype!r}; {nearest(str(self.dtype), DTYPES)}")

    @property
    def in_place(self) -> bool:
        return self.dtype == "float32"

    def encode(self, x_BHNPD, pos_BHNP=None):
        x = x_BHNPD.astype(self.dtype)
        return {"x": x if self.in_place else jax.lax.bitcast_convert_type(x, jnp.uint16)}

    def decode(self, code, pos_BHNP=None):
        x = code["x"]
        if self.dtype == "bfloat16":  # bfloat16 is the upper half of float32
            return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
        if self.dtype == "float16":
            return jax.lax.bitcast_convert_type(x, jnp.float16).astype(jnp.float32)
        return x

    def page_bytes(self, dim: int) -> int:
        return PAGE * dim * (4 if self.in_place else 2)
