"""What the last queries of a prompt attend to."""

import jax.numpy as jnp
from jax import lax

from kvlab import needs
from kvlab.core import part, static
from kvlab.errors import ConfigError
from kvlab.retention.last_queries import LastQueries


@part
class SnapKV(LastQueries):
    """Keeps what a window of last queries attends to, and the window itself: https://arxiv.org/abs/2404.14469.

        priority(i) = ∞ where i > now − window, else the mean over |j − i| ≤ kernel / 2 of mean_q a(q, j)

    q runs over the last `window` queries; a is the causal softmax over all they see, the mean over the query heads of a KV
    head. As in the authors' code, neighbours inside the window or before the first token count as 0. A row that is shorter
    than the window is all window: the newest that fit stay.

    While decoding the last `window` tokens stay, and the mean over q goes on as an exponential one of that span: each query
    moves it by 2 / (window + 1) of the way to what it gave the token, without its neighbours, which may be gone. A new token
    starts with what its own query gave it, those of a prompt's window with the mean over the queries that saw them.

    Fields, besides those of `Sized`:
      window: queries that rank, and newest tokens that stay.
      kernel: tokens that are averaged, odd.
    Errors: ConfigError for a window that prefill does not record, or an even kernel.
    """

    window: int = static(default=needs.WINDOW)
    kernel: int = static(default=5)

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__.lower()
        if not 1 <= self.window <= needs.WINDOW:
            raise ConfigError(f"{name}: window={self.window}; allowed: 1 … {needs.WINDOW}, the queries that prefill records")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"{name}: kernel={self.kernel}; allowed: odd numbers, 1 to average nothing")

    def score(self, key, value, pos, **seen):
        age = pos.max(-1, keepdims=True) - pos
        mean = self.received(seen["queries"], key, pos, self.window) / jnp.minimum(age + 1, self.window)
        before = age >= self.window
        half = self.kernel // 2
        sums = lax.reduce_window(
            jnp.where(before, mean, 0.0), 0.0, lax.add, (1, 1, self.kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half))
        )
        return jnp.where(before, sums / self.kernel, mean)

    def fresh(self, key, value, pos, **seen):
        return jnp.zeros(pos.shape)

    def observe(self, state, weight, pos, now):
        return jnp.where(pos == now, weight, state + (weight - state) * (2 / (self.window + 1)))

    def priority(self, state, pos, now):
        return jnp.where(pos > now - self.window, jnp.inf, state)
