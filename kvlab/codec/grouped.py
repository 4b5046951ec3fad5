"""Integers of 4 or 2 bits with a scale and a zero point for every group of numbers."""

import jax.numpy as jnp

from kvlab.codec.packed import half, pack, unpack, wide
from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError, nearest

ALONG = ("channel", "token")


@part
class Grouped(Codec):
    """x ≈ z + s·q with q in 0 … 2^bits − 1, z = min x and s = (max x − z) / (2^bits − 1) over a group.

    A group is `group_size` consecutive tokens of one channel (`along="channel"`, what keys need) or as many consecutive
    channels of one token (`along="token"`, for values): KIVI, https://arxiv.org/abs/2402.02750, sections 3.1 and 3.2.
    z is rounded down and s up to float16, so the error is at most s/2 for numbers within ±65504; beyond, they saturate.
    A page takes 64·D·bits/8 bytes and 4 for each of its 64·D / group_size groups.

    Attributes:
      residual: newest tokens that stay exact, at least.
    """

    along: str = static(default="token")
    group_size: int = static(default=32)
    residual: int = static(default=0)
    bits = 4

    def __post_init__(self):
        if self.along not in ALONG:
            raise ConfigError(f"{self.name} codec: along={self.along!r}; {nearest(str(self.along), ALONG)}")
        if self.group_size < 1 or (self.along == "channel" and PAGE % self.group_size):
            raise ConfigError(
                f"{self.name} codec: group_size={self.group_size}; allowed: a number that divides "
                f"{f'the {PAGE} tokens of a page' if self.along == 'channel' else 'the head dimension'}, such as 32"
            )
        if self.residual < 0:
            raise ConfigError(f"{self.name} codec: residual={self.residual}; allowed: 0 tokens or more, such as 128")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def group(self) -> int:
        return PAGE if self.along == "channel" else 1

    def at(self, layer: int, model):
        self._check(model.head_dim)
        return self

    def _check(self, dim: int):
        if dim * self.bits % 8:
            raise ConfigError(
                f"{self.name} codec: a head dimension of {dim} fills no whole bytes; allowed: multiples of {8 // self.bits}"
            )
        if self.along == "token" and dim % self.group_size:
            raise ConfigError(
                f"{self.name} codec: group_size={self.group_size} does not divide the head dimension {dim}; "
                f"allowed: 1 … {dim} that do, such as {min(dim & -dim, 32)}"
            )

    def _groups(self, x, parameters):
        """`x [..., p, D]` with an axis more that runs through a group, and that axis; of as many groups as `parameters`."""
        if self.along == "token":
            return x.reshape(*x.shape[:-1], parameters, -1), -1
        return x.reshape(*x.shape[:-2], parameters, -1, x.shape[-1]), -2

    def encode(self, x_BHNPD, pos_BHNP=None):
        self._check(x_BHNPD.shape[-1])
        across = x_BHNPD.shape[-1 if self.along == "token" else -2]
        x, axis = self._groups(x_BHNPD.astype(jnp.float32), across // self.group_size)
        zero = half(x.min(axis), up=False)
        levels = 2**self.bits - 1
        scale = half((x.max(axis) - wide(zero)) / levels, up=True)
        step = jnp.expand_dims(wide(scale), axis)
        q = jnp.round((x - jnp.expand_dims(wide(zero), axis)) / jnp.where(step > 0, step, 1.0))
        return {"x": pack(jnp.clip(q, 0, levels).reshape(x_BHNPD.shape), self.bits), "scale": scale, "zero": zero}

    def decode(self, code, pos_BHNP=None):
        q = unpack(code["x"], self.bits)
        scale, zero = wide(code["scale"]), wide(code["zero"])
        groups, axis = self._groups(q, scale.shape[-1 if self.along == "token" else -2])
        x = groups.astype(jnp.float32) * jnp.expand_dims(scale, axis) + jnp.expand_dims(zero, axis)
        return x.reshape(q.shape)

    def page_bytes(self, dim: int) -> int:
        return PAGE * dim * self.bits // 8 + 4 * PAGE * dim // self.group_size


@part
class Int4(Grouped):
    """Two numbers a byte; with groups of 64, 0.141 of fp32, with groups of 32, 0.156."""

    bits = 4


@part
class Int2(Grouped):
    """Four numbers a byte; with groups of 64, 0.078 of fp32, with groups of 32, 0.094."""

    bits = 2
