"""The largest numbers kept apart."""

import math

import jax
import jax.numpy as jnp

from kvlab.codec.wrapped import Wrapped
from kvlab.core import PAGE, part, static
from kvlab.errors import ConfigError


@part
class Outliers(Wrapped):
    """The ⌈share·D⌉ largest |x| of each token's vector are stored apart in bfloat16; `inner` sees zeros in their place.

    KVQuant, https://arxiv.org/abs/2401.18079, section 3.4: a few numbers widen the range of all others. Their number is
    the same in every vector, so that shapes are static. Their error is at most 2^−9 |x|, none where the model computes in
    bfloat16; that of the rest is inner's. Each takes 2 bytes and its channel's number 1 (2 where D > 256).
    """

    share: float = static(default=0.01)

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise ConfigError(f"outliers codec: share={self.share}; allowed: above 0 and below 1, such as 0.01")

    def count(self, dim: int) -> int:
        return math.ceil(self.share * dim - 1e-9)

    def encode(self, x_BHNPD, pos_BHNP=None):
        x, dim = x_BHNPD.astype(jnp.float32), x_BHNPD.shape[-1]
        channel = jax.lax.top_k(jnp.abs(x), self.count(dim))[1]
        kept = jnp.take_along_axis(x, channel, -1).astype(jnp.bfloat16)
        apart = (channel[..., None] == jnp.arange(dim)).any(-2)
        return {
            **self.inner.encode(jnp.where(apart, 0.0, x), pos_BHNP),
            "kept": jax.lax.bitcast_convert_type(kept, jnp.uint16),
            "channel": channel.astype(jnp.uint8 if dim <= 256 else jnp.uint16),
        }

    def decode(self, code, pos_BHNP=None):
        x = self.plain(code, pos_BHNP)
        kept = jax.lax.bitcast_convert_type(code["kept"].astype(jnp.uint32) << 16, jnp.float32)
        for i in range(kept.shape[-1]):
            x = jnp.where(jnp.arange(x.shape[-1]) == code["channel"][..., i, None], kept[..., i, None], x)
        return x

    def page_bytes(self, dim: int) -> int:
        return self.inner.page_bytes(dim) + PAGE * self.count(dim) * (3 if dim <= 256 else 4)
