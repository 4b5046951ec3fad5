"""Vectors turned so that no channel stands out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.codec.wrapped import Wrapped
from kvlab.core import part
from kvlab.errors import ConfigError


@functools.cache
def matrix(dim: int) -> np.ndarray:
    """The orthonormal Walsh–Hadamard matrix `[D, D]`, which is its own inverse. Errors: ConfigError unless D is 2^n."""
    if dim < 1 or dim & (dim - 1):
        raise ConfigError(f"hadamard codec: a head dimension of {dim}; allowed: powers of two; leave the rotation out")
    one = np.ones((1, 1), np.float32)
    for _ in range(dim.bit_length() - 1):
        one = np.block([[one, one], [one, -one]])
    return one / np.float32(dim**0.5)


def turn(x):
    return jnp.matmul(x, matrix(x.shape[-1]), precision=jax.lax.Precision.HIGHEST)


@part
class Hadamard(Wrapped):
    """`inner` stores H·x, with H orthonormal: QuaRot, https://arxiv.org/abs/2404.00456, section 4 (the KV cache).

    H spreads a channel that is large over all of them. Nothing is turned back on reading: q·k = (H·q)·(H·k), so each query
    is turned once (`query`), and so is the weighted sum of values, by H again (`output`). H keeps lengths, so the error of
    a vector is as long as inner's. No bytes of its own.
    """

    @property
    def in_place(self) -> bool:
        return self.inner.in_place

    def at(self, layer: int, model):
        matrix(model.head_dim)
        return super().at(layer, model)

    def encode(self, x_BHNPD, pos_BHNP=None):
        return self.inner.encode(turn(x_BHNPD.astype(jnp.float32)), pos_BHNP)

    def decode(self, code, pos_BHNP=None):
        return self.inner.decode(code, pos_BHNP)

    def query(self, query_BHQD):
        return self.inner.query(turn(query_BHQD))

    def output(self, out_BHQD):
        return turn(self.inner.output(out_BHQD))
