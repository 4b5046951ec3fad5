"""What got the most attention so far, and the newest."""

import jax.numpy as jnp

from kvlab.core import kept, part, static
from kvlab.errors import ConfigError
from kvlab.retention.sized import Sized


@part
class H2O(Sized):
    """Keeps the tokens that collected the most attention, and the newest: https://arxiv.org/abs/2306.14048, algorithm 1.

        priority(i) = ∞ where i > now − R, else Σ_{q ≥ i} a(q, i)        R = ⌊recent · budget⌋

    a is the causal softmax, the mean over the query heads of a KV head. At fill the sum runs over all queries of the prompt.
    While decoding each query adds what it gave the stored tokens; a token starts at 0 when it comes and has R steps, in which
    it cannot go, to collect. Sums are never divided, so an old token has had more time: see `ObservedAttention`.

    Fields, besides those of `Sized`:
      recent: share of the budget that is the newest tokens; half of it in the paper.
    State: `got` and the position `until` which a token is safe. Errors: ConfigError for a share outside 0 … 1.
    """

    recent: float = static(default=0.5)
    needs = ("attention", "budget")
    observes = True

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.recent <= 1:
            raise ConfigError(f"h2o: recent={self.recent}; allowed: 0 (no token is safe) … 1 (a window of the newest alone)")

    def score(self, key, value, pos, **seen):
        got = seen["attention"]
        until = pos + kept(seen["budget"], 1 - self.recent)
        return {"got": got, "until": jnp.broadcast_to(until, got.shape).astype(jnp.float32)}

    def fresh(self, key, value, pos, **seen):
        return self.score(key, value, pos, **seen, attention=jnp.zeros(pos.shape))

    def observe(self, state, weight, pos, now):
        return state | {"got": state["got"] + weight}

    def priority(self, state, pos, now):
        return jnp.where(now < state["until"], jnp.inf, state["got"])
