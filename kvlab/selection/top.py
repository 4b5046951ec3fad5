"""The highest scores are read: what every selection with a budget shares."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvlab.core import PAGE, Pages, Selection, Tokens, part, static
from kvlab.errors import ConfigError, nearest
from kvlab.selection import choose

GRANULARITIES = ("token", "page")


@part
class Top(Selection):
    """Reads the K tokens, or the pages, of highest score for each KV head; sinks and recent tokens are among them.

        K = min(max_k, ⌈(1 − sparsity) · visible⌉)        pages: the newest, and as many others as hold the rest

    A subclass says what a token's score is, or a page's.

    Fields:
      sparsity: share that is left out, 0 … 1; one figure, or one per row of the batch (an array: no new trace).
      max_k: most tokens to read, None for no limit. Static.
      granularity: "token" or "page".
      sinks, recent: first and last tokens that are always read, inside K.
      read: instead of `sparsity`: the share of the dense layer's bytes to read, index keys included, so that selections
        with different indices are compared at equal bytes.
    """

    sparsity: Any = 0.9
    max_k: int | None = static(default=None)
    granularity: str = static(default="token")
    sinks: int = 4
    recent: int = 32
    read: float | None = static(default=None)

    def __post_init__(self):
        if self.granularity not in GRANULARITIES:
            raise ConfigError(f"selection: granularity={self.granularity!r}; {nearest(str(self.granularity), GRANULARITIES)}")
        if self.max_k is not None and self.max_k < 1:
            raise ConfigError(f"selection: max_k={self.max_k}; allowed: 1 and more, or leave it out")
        several = isinstance(self.sparsity, list | tuple)
        asked = self.sparsity if several else [self.sparsity]
        if not all(0 <= x < 1 for x in asked if isinstance(x, float | int)):
            raise ConfigError(f"selection: sparsity={self.sparsity}; allowed: 0 (read all) up to, but not, 1")
        if several:
            choose.freeze(self, "sparsity")

    @property
    def single(self) -> bool:
        return self.granularity == "token"

    def at(self, layer, model, token_bytes):
        """Errors: ConfigError for a `read` that the index alone exceeds."""
        if self.read is None:
            return self
        index = self.index_bytes(model.head_dim) / token_bytes
        if not index < self.read <= 1 + index:
            raise ConfigError(
                f"selection: read={self.read}; its index keys alone take {index:.3f} of the dense bytes; "
                f"allowed: above that, up to {1 + index:.3f}"
            )
        return dataclasses.replace(self, sparsity=max(1 - (self.read - index), 0.0), read=None)

    def rows(self, index):
        return choose.of_rows(self, "sparsity", index)

    def scores(self, state, query_BHQD, visible_BHNP, cache, around):
        """Float `[B, H, N, P]`; the highest are read."""
        raise NotImplementedError(f"{type(self).__name__} must define scores(state, query, visible, cache, around)")

    def page_scores(self, state, query_BHQD, visible_BHNP, cache, around):
        """Float `[B, H, N]`: a page is worth what its best token is."""
        scores = self.scores(state, query_BHQD, visible_BHNP, cache, around)
        return jnp.where(visible_BHNP, scores, -jnp.inf).max(-1)

    def select(self, state, query, visible, cache, around):
        number, bound = self.count(visible)
        if self.granularity == "page":
            scores = self.page_scores(state, query, visible, cache, around)
            return Pages(self.pages(scores, number, visible, cache), bound)
        scores = self.scores(state, query, visible, cache, around)
        return Tokens(self.tokens(scores, number, visible, cache), bound)

    def count(self, visible_BHNP):
        """K and the active bound, `[B, H]`."""
        sparsity = choose.by_row(self.sparsity, len(visible_BHNP), "selection", "sparsities")
        return choose.count(visible_BHNP.sum((-1, -2), dtype=jnp.int32), sparsity, self.max_k)

    def tokens(self, score_BHNP, number_BH, visible_BHNP, cache):
        """Slots of the best tokens, `[B, H, R]`."""
        B, H, N, P = visible_BHNP.shape
        score, ok, pos = (x.reshape(B, H, N * P) for x in (score_BHNP, visible_BHNP, cache.pos))
        return choose.numbers(self.keep(score, ok, pos, number_BH), min(self.max_k or N * P, N * P))

    def keep(self, score_BHX, ok_BHX, pos_BHX, number_BH):
        """Mask of the tokens that are read; with more axes between heads and tokens, for many queries at once."""
        forced = self.forced(ok_BHX, pos_BHX, number_BH)
        return choose.top(jnp.where(forced, jnp.inf, score_BHX), ok_BHX, pos_BHX, number_BH)

    def forced(self, ok_BHX, pos_BHX, number_BH):
        now = jnp.where(ok_BHX, pos_BHX, -1).max(-1)
        return choose.forced(pos_BHX, now, number_BH, self.sinks, self.recent) & ok_BHX

    def pages(self, score_BHN, number_BH, visible_BHNP, cache):
        """The best pages, `[B, H, R]`: first the newest, then those of sinks, then of recent tokens, then by score."""
        N = visible_BHNP.shape[2]
        pos = jnp.where(visible_BHNP, cache.pos, -1)
        newest, now = pos.max(-1), pos.max((-1, -2))[..., None]
        held = visible_BHNP.sum(-1, dtype=jnp.int32)
        begun = jnp.where(newest == now, held, 0).max(-1)  # tokens of the page that is not full yet
        others = jnp.maximum((held > 0).sum(-1) - 1, 1)
        each = jnp.maximum((held.sum(-1) - begun) / others, 1.0)  # 64, unless a window or an eviction left gaps
        number, most = 1 + jnp.floor(jnp.maximum(number_BH - begun, 0) / each + 0.5).astype(jnp.int32), N
        if self.max_k is not None:
            number = jnp.minimum(number, 1 + jnp.maximum(self.max_k - begun, 0) // PAGE)
            most = min(self.max_k // PAGE + 1, N)
        huge = jnp.finfo(jnp.float32).max
        score = jnp.clip(score_BHN, -huge / 4, huge / 4)
        score = jnp.where(newest > now - self.recent, huge / 2, score)
        score = jnp.where((visible_BHNP & (cache.pos < self.sinks)).any(-1), huge, score)
        score = jnp.where(newest == now, jnp.inf, score)
        return choose.numbers(choose.top(score, newest >= 0, newest, number), most)
