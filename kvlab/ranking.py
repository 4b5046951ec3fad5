"""From a retention's priorities to what a prompt leaves stored and to what goes for a new token.

`policy` is a `kvlab.policy.Policy`. Tokens compete one by one, or in pages, whose priority is their tokens' largest or mean.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kvlab import reading, renewal
from kvlab.core import PAGE, Cache, Record


def seen(policy, record: Record, budget: int) -> dict[str, Any]:
    """What the retention of a policy needs of a prompt, by name."""
    there = {"budget": budget, **record.seen}
    return {name: there[name] for name in policy.retention.needs}


def keep(policy, record: Record, budget: int):
    """The retention's state, which tokens stay `[B, H, T]`, and the pages that each head is given, `[B, H]`."""
    B, H, T, _ = record.key_BHTD.shape
    retention, pos_B1T = policy.retention, record.pos_BT[:, None]
    score = retention.score(record.key_BHTD, record.value_BHTD, pos_B1T, **seen(policy, record, budget))
    pos, now = jnp.broadcast_to(pos_B1T, (B, H, T)), pos_B1T.max(-1, keepdims=True)
    priority = jnp.broadcast_to(retention.priority(score, pos, now), pos.shape).astype(jnp.float32)
    priority = jnp.where(pos >= 0, priority, -jnp.inf)
    most = retention.shares(priority, pos, budget)[..., None] if retention.uneven else budget
    if policy.unit > 1 and retention.aligned:
        stays = _whole_pages(retention, priority, pos, now, most) & (pos >= 0)
    else:
        stays = (_rank(priority, pos) < most) & (priority > -jnp.inf)
    least = 1 + policy.waits if retention.evicts else 1  # so that a full page can go before the open one must
    quota = jnp.maximum(-(-jnp.broadcast_to(most, (B, H, 1))[..., 0] // PAGE), least)
    return score, stays, quota.astype(jnp.int32)


def victim(policy, cache: Cache, pos_B):
    """The unit of lowest priority among a head's own, `[B, H]`; among equals the oldest."""
    flat = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])
    pos = flat(cache.pos)
    state = renewal.state(policy, cache) if policy.retention.renews else jax.tree.map(flat, cache.retained)
    priority = policy.retention.priority(state, pos, pos_B[:, None, None])
    priority = jnp.broadcast_to(priority, pos.shape).astype(jnp.float32)
    if policy.unit > 1:
        priority = _pool(policy.retention.pool, priority.reshape(cache.pos.shape), cache.pos)
        may = policy.slots.owned(cache) & ~reading.in_tail(cache.waiting, jnp.arange(cache.pos.shape[2]))
        pos = cache.pos.max(-1)
    else:
        priority = jnp.where(pos >= 0, priority, -jnp.inf)
        may = jnp.arange(pos.shape[-1]) < cache.budget
    lowest = may & (priority == jnp.where(may, priority, jnp.inf).min(-1, keepdims=True))
    return jnp.argmin(jnp.where(lowest, pos, jnp.iinfo(jnp.int32).max), -1).astype(jnp.int32)


def _whole_pages(retention, priority_BHT, pos_BHT, now_B11, most):
    """Mask of the tokens whose aligned pages rank among the first; the page that is still open is always one of them."""
    paged = lambda x: x.reshape(*x.shape[:2], -1, PAGE)
    page = _pool(retention.pool, paged(priority_BHT), paged(pos_BHT))
    page = jnp.where(jnp.arange(page.shape[-1]) == now_B11 // PAGE, jnp.inf, page)
    stays = (_rank(page, paged(pos_BHT).max(-1)) < most // PAGE) & (page > -jnp.inf)
    return jnp.repeat(stays, PAGE, -1)


def _rank(priority, pos):
    """Rank of each entry, 0 for the highest priority; among equals the newest is first."""
    order = jnp.lexsort((pos, priority), axis=-1)[..., ::-1]
    return jnp.argsort(order, -1)


def _pool(how: str, priority_BHNP, pos_BHNP):
    """Priorities of pages from those of their tokens; an empty page has −inf."""
    live = pos_BHNP >= 0
    if how == "max":
        return jnp.where(live, priority_BHNP, -jnp.inf).max(-1)
    total, count = jnp.where(live, priority_BHNP, 0.0).sum(-1), live.sum(-1)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)
