"""What the tokens after them do not explain stays."""

import jax.numpy as jnp
from jax import nn

from kvlab.core import PAGE, part, static
from kvlab.errors import ConfigError
from kvlab.retention.sized import Sized


@part
class LagKV(Sized):
    """Keeps, of every `lag` tokens, those that stand out from the `lag` tokens after them, in keys and values.

        x̂ = (x − min) / (max − min), minimum and maximum per channel over the next partition
        s(token) = ½ Σ over x ∈ {k, v} of softmax over the partition of (std over channels of x̂)
        priority(token) = rank of s in its partition / lag

    https://arxiv.org/abs/2504.04704, section 3. Partitions start after the first `sinks` tokens, which never go. The last whole
    partition and what comes after it have priority 1, so short prompts keep their newest. While decoding the stored tokens,
    in order of position, are cut into partitions anew whenever something has to go; that reads all of them, hence pages by
    default. Errors: ConfigError for negative sinks or a lag below 1.
    """

    sinks: int = static(default=4)
    lag: int = static(default=128)
    unit: int | None = static(default=PAGE)
    renews = True

    def __post_init__(self):
        super().__post_init__()
        if self.sinks < 0 or self.lag < 1:
            raise ConfigError(f"lagkv: sinks={self.sinks}, lag={self.lag}; sinks must be ≥ 0 and lag ≥ 1, such as 4 and 128")

    def score(self, key, value, pos, **seen):
        T, index = key.shape[2], jnp.arange(key.shape[2])
        part = (index - self.sinks) // self.lag
        scored = part < ((pos >= 0).sum(-1, keepdims=True) - self.sinks) // self.lag - 1
        mean = (self._apart(key) + self._apart(value)) / 2
        rank = jnp.argsort(jnp.argsort(mean, -1), -1) / self.lag
        rank = jnp.pad(rank.reshape(*rank.shape[:2], -1), ((0, 0), (0, 0), (self.sinks, 0)))[..., :T]
        return jnp.where(index < self.sinks, jnp.inf, jnp.where(scored, rank, 1.0))

    def _apart(self, x):
        """How far tokens are from the next partition's, `[B, H, partitions, lag]`; of use only where that one is whole."""
        x = x[:, :, self.sinks :]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % self.lag or self.lag * (not x.shape[2])), (0, 0)))
        x = x.reshape(*x.shape[:2], -1, self.lag, x.shape[3])
        after = jnp.roll(x, -1, 2)
        low, high = after.min(3, keepdims=True), after.max(3, keepdims=True)
        inside = (x - low) / jnp.where(high > low, high - low, 1.0)
        return nn.softmax(inside.std(-1, ddof=1), -1)

    def priority(self, state, pos, now):
        return state
