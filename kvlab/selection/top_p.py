"""As many tokens as their attention asks for."""

from typing import Any

import jax.numpy as jnp

from kvlab.core import BY_MAXIMUM, BY_SHARE, NO_BOUND, Selection, Tokens, part, static
from kvlab.errors import ConfigError
from kvlab.selection import choose
from kvlab.selection.controls import attention


@part
class TopP(Selection):
    """Reads the fewest tokens that hold the share p of the attention, for each KV head: Twilight,
    https://arxiv.org/abs/2502.02770, section 4.1 (the problem of an oracle with a top-p budget).

        read = sinks ∪ recents ∪ argmin |S|    with    Σ over what is read of attention ≥ p

    Attention is the mean over the query heads of a KV head, exact, so every key is read to know it: a bound like the oracle,
    where Twilight estimates it from keys of 4 bits. Among equals the newest are read. `bound` is BY_SHARE where p decided,
    BY_MAXIMUM where max_k cut it short, NO_BOUND where everything was read.

    Fields:
      p: share of attention, above 0 and up to 1, which reads everything; one figure, or one per row (an array: no new trace).
      max_k: most tokens to read, None for no limit. Static.
      sinks, recent: first and last tokens that are always read, inside max_k.
    Errors: ConfigError for figures out of range, or a number of shares that is not the number of rows.
    """

    p: Any = 0.95
    max_k: int | None = static(default=None)
    sinks: int = 4
    recent: int = 32
    single = True

    def __post_init__(self):
        several = isinstance(self.p, list | tuple)
        if not all(0 < x <= 1 for x in (self.p if several else [self.p]) if isinstance(x, float | int)):
            raise ConfigError(f"top_p: p={self.p}; allowed: above 0, up to 1 (read all)")
        if self.max_k is not None and self.max_k < 1:
            raise ConfigError(f"top_p: max_k={self.max_k}; allowed: 1 and more, or leave it out")
        if several:
            choose.freeze(self, "p")

    def rows(self, index):
        return choose.of_rows(self, "p", index)

    def select(self, state, query, visible, cache, around):
        B, H, N, P = visible.shape
        weight, ok, pos = (x.reshape(B, H, N * P) for x in (attention(around.logits(), visible), visible, cache.pos))
        length = ok.sum(-1, dtype=jnp.int32)
        most = length if self.max_k is None else jnp.minimum(length, self.max_k)
        forced = ok & choose.forced(pos, jnp.where(ok, pos, -1).max(-1), most, self.sinks, self.recent)
        share = choose.by_row(self.p, B, "top_p", "shares")
        missing = share - jnp.where(forced, weight, 0.0).sum(-1)
        wanted = forced.sum(-1, dtype=jnp.int32) + choose.cover(jnp.where(ok & ~forced, weight, 0.0), missing)
        wanted = jnp.where(share >= 1, length, jnp.minimum(wanted, length))
        read = choose.top(jnp.where(forced, jnp.inf, weight), ok, pos, jnp.minimum(wanted, most))
        bound = jnp.where(wanted > most, BY_MAXIMUM, jnp.where(wanted < length, BY_SHARE, NO_BOUND))
        return Tokens(choose.numbers(read, min(self.max_k or N * P, N * P)), bound)
