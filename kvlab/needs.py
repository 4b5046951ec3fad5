"""What a retention may ask for besides keys and values, by name, and how a layer's pass gives it.

    of every token      hidden        [B, 1, T, E]        the layer's input, the residual stream before its norm
                        output_norm   [B, H, T]           ‖W_o v‖₁, the mean over the query heads of a KV head
                        importance    [B, H, T]           what a replay of the prompt says (`kvlab.replay`), ∞ after it
    of prompts alone    attention     [B, H, T]           the sum, over all later queries and itself, of the attention it got
                        queries       [B, H, W, G, D]     the last W = 64 queries, rotated and scaled; zeros before the first
                        query_mean    [B, H, G, D]        over the prompt from position SKIP on, before rotation
                        query_cov     [B, H, G, D, D]     the same queries' covariance
    of the cache        budget        int                 how many tokens stay

Everything is taken block by block, so nothing of size T × T is ever held.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kvlab import attention
from kvlab.attention import AttentionSpec

OF_TOKENS = ("hidden", "output_norm", "importance")
OF_PROMPTS = ("attention", "queries", "query_mean", "query_cov")
ALL = (*OF_TOKENS, *OF_PROMPTS, "budget")
REPLAYED = frozenset({"importance"})  # of these, what takes a pass of its own after prefill
CARRIED = frozenset({"queries", "query_mean", "query_cov"})  # no token's own, so they can go with a cache
WINDOW = 64  # queries
SKIP = 4  # first tokens: their queries are unlike all others


class Pass(NamedTuple):
    """One layer's pass over a prompt's tokens, or over one token of each row."""

    hidden: Any  # [B, T, E] or [B, E]
    value: Any  # [B, (T,) H, D]
    out_EHGD: Any  # the output projection, [E, H, G, D]


class Prompt(NamedTuple):
    """What a prompt's pass has besides: rotated queries and keys, their positions (EMPTY in pads) and rotary frequencies."""

    query_BTHGD: Any
    key_BHTD: Any
    pos_BT: Any
    spec: AttentionSpec
    frequency: Any


def of_tokens(at: Pass, names) -> dict[str, Any]:
    """What a token has of its own, with an axis for heads in second place, then the tokens' axis if there is one."""
    made = {
        "hidden": lambda: at.hidden[:, None],
        "output_norm": lambda: jnp.moveaxis(_output_norm(at.value, at.out_EHGD), -1, 1),
        "importance": lambda: jnp.full((len(at.hidden), 1, *at.hidden.shape[1:-1]), jnp.inf),
    }
    return {name: made[name]() for name in sorted(names) if name in made}


def of_prompt(at: Prompt, names) -> dict[str, Any]:
    """What only a prompt has."""
    moments = functools.cache(lambda: _moments(at))
    made = {
        "attention": lambda: attention.columns(at.query_BTHGD, at.key_BHTD, at.pos_BT, at.spec),
        "queries": lambda: _last_queries(at),
        "query_mean": lambda: moments()[0],
        "query_cov": lambda: moments()[1],
    }
    return {name: made[name]() for name in sorted(names) if name in made}


def blank(names, batch: int, heads: int, groups: int, tokens: int, hidden: int, dim: int) -> dict[str, Any]:
    """What an empty prompt leaves."""
    shape = {
        "hidden": (batch, 1, tokens, hidden), "output_norm": (batch, heads, tokens), "importance": (batch, heads, tokens),
        "attention": (batch, heads, tokens), "queries": (batch, heads, WINDOW, groups, dim),
        "query_mean": (batch, heads, groups, dim), "query_cov": (batch, heads, groups, dim, dim),
    }  # fmt: skip
    return {name: jnp.zeros(shape[name]) for name in sorted(names) if name in shape}


def _output_norm(value, out_EHGD):
    """`[..., H]`, one query head at a time."""
    (H, G), out = out_EHGD.shape[1:3], jnp.asarray(out_EHGD)
    one = lambda n: jnp.abs(jnp.take(value, n // G, -2) @ out[:, n // G, n % G].T).sum(-1)
    norm = lax.map(one, jnp.arange(H * G))
    return jnp.moveaxis(norm.reshape(H, G, *norm.shape[1:]).mean(1), 0, -1)


def _last_queries(at: Prompt):
    pos = at.pos_BT.max(-1)[:, None] + jnp.arange(1 - WINDOW, 1)
    query = jnp.take_along_axis(at.query_BTHGD, jnp.maximum(pos, 0)[..., None, None, None], 1) * at.spec.scale
    return jnp.moveaxis(jnp.where((pos >= 0)[..., None, None, None], query, 0.0), 2, 1)


def _moments(at: Prompt):
    cos, sin = attention.rotary(jnp.maximum(at.pos_BT, 0), at.frequency)
    query = attention.rotate(at.query_BTHGD, cos[:, :, None, None], -sin[:, :, None, None])
    weight = (at.pos_BT >= SKIP) / jnp.maximum((at.pos_BT >= SKIP).sum(-1, keepdims=True), 1)
    mean = jnp.einsum("bt,bthgd->bhgd", weight, query)
    apart = query - mean[:, None]
    return mean, jnp.einsum("bt,bthgd,bthge->bhgde", weight, apart, apart)
