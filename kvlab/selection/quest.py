"""Page bounds."""

import jax.numpy as jnp

from kvlab.core import PAGE, part, static
from kvlab.errors import ConfigError
from kvlab.selection.top import Top


@part
class Quest(Top):
    """Pages by an upper bound of what a query can score in them (https://arxiv.org/abs/2406.10774, section 3.3):

        bound(q, page) = Σ_d max(q_d · max_d, q_d · min_d)

    from the largest and smallest value of each channel over the page's keys, averaged over the query heads of a KV head.
    Bounds only widen: they stay sound, and loose, after tokens of a page were evicted or cut off.
    """

    granularity: str = static(default="page")

    def __post_init__(self):
        super().__post_init__()
        if self.granularity != "page":
            raise ConfigError(f'quest: granularity={self.granularity!r}; it bounds pages, write granularity = "page"')

    def index_bytes(self, dim):
        return 2 * dim * 4 / PAGE

    def start(self, key_BHNPD, pos_BHNP):
        live = (pos_BHNP >= 0)[..., None]
        return jnp.where(live, key_BHNPD, -jnp.inf).max(-2), jnp.where(live, key_BHNPD, jnp.inf).min(-2)

    def write(self, state, page, offset, key_BHD, pos_B, fresh):
        most, least = state
        row, head = jnp.indices(page.shape, sparse=True)
        old = lambda x: x[row, head, jnp.minimum(page, x.shape[2] - 1)]
        joined = lambda pick, x: jnp.where(fresh[..., None], key_BHD, pick(old(x), key_BHD))
        put = lambda x, new: x.at[row, head, page].set(new, mode="drop")
        return put(most, joined(jnp.maximum, most)), put(least, joined(jnp.minimum, least))

    def page_scores(self, state, query_BHQD, visible, cache, around):
        most, least = (jnp.where(jnp.isfinite(x), x, 0.0) for x in state)
        up, down = jnp.maximum(query_BHQD, 0).mean(2), jnp.minimum(query_BHQD, 0).mean(2)
        return jnp.einsum("bhd,bhnd->bhn", up, most) + jnp.einsum("bhd,bhnd->bhn", down, least)
