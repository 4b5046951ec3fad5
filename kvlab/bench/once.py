"""Retentions for comparisons with libraries that compress a prompt and keep all that comes afterwards."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kvlab.core import PAGE, Cache, Retention, kept, part, static
from kvlab.policy import Policy
from kvlab.retention.combinator import Combinator
from kvlab.selection import choose


@part
class Once(Combinator):
    """`inner` over the prompt alone: the share `ratio` of each row's own prompt goes, and nothing that comes afterwards.

    A new token takes a slot of its own, so nothing is ranked or watched while decoding. Where inner shares a budget out among
    heads, each head has its share of the prompt and then room for what comes.

    Fields:
      inner: any retention; its own budget is not asked for.
      ratio: share of the prompt that goes (`kvlab.core.kept`).
      room: tokens that may come after the prompt.
      length: tokens of the longest prompt of a batch, where inner shares a budget out among heads: of this prompt it does.
    """

    inner: Any
    ratio: float = static(default=0.5)
    room: int = static(default=64)
    length: int = static(default=0)
    unit = None
    evicts = False
    observes = False
    renews = False

    def budget(self, prompt, total, unit):
        return kept(prompt, self.ratio) + self.room

    def score(self, key, value, pos, **seen):
        """Inner's priority of the tokens that stay, −inf of the others."""
        if "budget" in seen:
            seen = {**seen, "budget": seen["budget"] - self.room}
        shape, now = key.shape[:3], pos.max(-1, keepdims=True)
        own = self.inner.priority(self.inner.score(key, value, pos, **seen), jnp.broadcast_to(pos, shape), now)
        own = jnp.where(pos >= 0, jnp.broadcast_to(own, shape).astype(jnp.float32), -jnp.inf)
        table = [kept(length, self.ratio) for length in range(shape[2] + 1)]
        number = jnp.broadcast_to(jnp.asarray(table)[now[..., 0] + 1], shape[:2])
        if self.inner.uneven:
            number = self.inner.shares(own, jnp.broadcast_to(pos, shape), kept(self.length, self.ratio))
        stays = choose.top(own, jnp.broadcast_to(pos >= 0, shape), jnp.broadcast_to(pos, shape), number)
        return jnp.where(stays, own, -jnp.inf)

    def fresh(self, key, value, pos, **seen):
        return jnp.zeros(pos.shape)

    def priority(self, state, pos, now):
        return state

    def shares(self, priority, pos, budget):
        """What each head keeps and room; the last head also gets the pages that rounding spares in this prompt or another.

        So all prompts, and all layers, have pools of one size and share their programs.
        """
        mine = (priority > -jnp.inf).sum(-1, dtype=jnp.int32) + self.room
        heads = mine.shape[1]
        most = heads * (kept(self.length, self.ratio) + self.room) // PAGE + heads
        spare = most - (-(-mine // PAGE)).sum(-1)
        return mine.at[:, -1].add(spare * PAGE)

    def visibility(self):
        return super(Combinator, self).visibility()


@part
class Onward(Retention):
    """What a cache goes on with that `Once` has filled: everything stays, and how the prompt was ranked is forgotten.

    It knows no method, so the caches of all methods go through the same programs.

    Fields:
      uneven: whether heads have pages of one pool.
    """

    uneven: Any = static(default=False)
    evicts = False

    def priority(self, state, pos, now):
        return pos


def onward(policies: Sequence[Policy], caches: Sequence[Cache]) -> tuple[tuple[Policy, ...], tuple[Cache, ...]]:
    """Filled caches whose policies no longer say which method filled them; those of local layers stay as they are."""
    once = [isinstance(policy.retention, Once) for policy in policies]
    after = lambda policy: dataclasses.replace(policy, retention=Onward(policy.retention.uneven))
    bare = lambda cache: dataclasses.replace(cache, retained=(), carried={})
    return (
        tuple(after(policy) if mine else policy for policy, mine in zip(policies, once)),
        tuple(bare(cache) if mine else cache for cache, mine in zip(caches, once)),
    )
