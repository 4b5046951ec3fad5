"""Four bits whose levels are spread like a normal distribution."""

from statistics import NormalDist

import jax.numpy as jnp
import numpy as np

from kvlab.codec.packed import half, pack, unpack, wide
from kvlab.core import PAGE, Codec, part, static
from kvlab.errors import ConfigError


def levels() -> np.ndarray:
    """The 16 levels: quantiles of the normal distribution, 7 from −1 on, 0, and 8 up to 1, float32.

    https://arxiv.org/abs/2305.14314, section 3 and appendix E. The outermost quantiles lie halfway between those of 16 and
    of 15 equal shares; each half is scaled to 1.
    """
    outer = 1 - (1 / 32 + 1 / 30) / 2
    side = lambda n: [NormalDist().inv_cdf(0.5 + (outer - 0.5) * i / n) for i in range(n + 1)]
    below, above = side(7), side(8)
    return np.array([-x / below[-1] for x in below[:0:-1]] + [x / above[-1] for x in above], np.float32)


LEVELS = levels()
BETWEEN = (LEVELS[1:] + LEVELS[:-1]) / 2


@part
class NF4(Codec):
    """x ≈ a·LEVELS[q], q the nearest of 16 levels and a = max|x| over `group_size` channels of a token, rounded up to float16.

    NormalFloat, https://arxiv.org/abs/2305.14314. The error is at most 0.152·a, half the widest gap between levels, for
    numbers within ±65504; beyond, they saturate. A page takes 64·D/2 bytes and 2 for each of its 64·D / group_size groups.
    """

    group_size: int = static(default=64)

    def __post_init__(self):
        if self.group_size < 1:
            raise ConfigError(f"nf4 codec: group_size={self.group_size}; allowed: a divisor of the head dimension, such as 64")

    def at(self, layer: int, model) -> "NF4":
        self._check(model.head_dim)
        return self

    def _check(self, dim: int):
        if dim % 2 or dim % self.group_size:
            raise ConfigError(
                f"nf4 codec: group_size={self.group_size} and a head dimension of {dim}; allowed: even dimensions and "
                f"divisors of them, such as {min(dim & -dim, 64)}"
            )

    def encode(self, x_BHNPD, pos_BHNP=None):
        self._check(x_BHNPD.shape[-1])
        x = x_BHNPD.astype(jnp.float32).reshape(*x_BHNPD.shape[:-1], -1, self.group_size)
        scale = half(jnp.abs(x).max(-1), up=True)
        step = wide(scale)[..., None]
        share = x / jnp.where(step > 0, step, 1.0)
        q = sum(((share > border).astype(jnp.uint8) for border in BETWEEN), start=jnp.zeros(x.shape, jnp.uint8))
        return {"x": pack(q.reshape(x_BHNPD.shape), 4), "scale": scale}

    def decode(self, code, pos_BHNP=None):
        q = unpack(code["x"], 4)
        share = jnp.asarray(LEVELS)[q].reshape(*q.shape[:-1], -1, self.group_size)
        return (share * wide(code["scale"])[..., None]).reshape(q.shape)

    def page_bytes(self, dim: int) -> int:
        return PAGE * dim // 2 + 2 * PAGE * dim // self.group_size
