"""Exact attention from pieces: partial results over blocks, their merge, prefill in blocks, the dense reference.

Softmax attention over a set of keys can be computed piece by piece: each piece leaves an unnormalised output, the
largest logit and the sum of exponentials relative to it, and two pieces merge exactly. This is the online softmax of
Milakov & Gimelshein (https://arxiv.org/abs/1805.02867), used over blocks as in FlashAttention
(https://arxiv.org/abs/2205.14135, algorithm 1). Dimension letters are defined in `kvlab.core`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

PREFILL_BLOCK = 512  # queries, and keys, of a prompt that meet at a time

MASKED = -1e30  # finite: −inf − (−inf) would be NaN


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a model demands of one layer's attention, whatever the cache's policy.

    Attributes:
      scale: multiplies the logits, usually `head_dim ** -0.5`.
      window: a query at position t sees positions t - window + 1 … t; None sees all.
      softcap: logits become `softcap * tanh(logits / softcap)`; None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def cap(self, logits):
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def sees(self, pos, now):
        """Whether a query at position `now` may see a token at position `pos` (EMPTY slots are never seen)."""
        ok = (pos >= 0) & (pos <= now)
        return ok if self.window is None else ok & (pos > now - self.window)


class Partial(NamedTuple):
    """Attention over some of the keys, unnormalised: Σ w·v, max logit, Σ w, Σ w·logit with w = exp(logit − max)."""

    out: Any  # [B, H, Q, D]
    top: Any  # [B, H, Q]
    mass: Any  # [B, H, Q]
    moment: Any  # [B, H, Q]


def nothing(batch: int, heads: int, queries: int, dim: int) -> Partial:
    """The partial of no keys at all: the identity of `merge`."""
    flat = jnp.zeros((batch, heads, queries))
    return Partial(jnp.zeros((batch, heads, queries, dim)), flat + MASKED / 2, flat, flat)


def partial(logits, ok, mix: Callable) -> Partial:
    """Attention over one block.

    Args:
      logits: `[B, H, Q, N, P]`, scaled and capped.
      ok: which keys may be read, broadcastable to `logits`.
      mix: turns weights `[B, H, Q, N, P]` into their sum of values `[B, H, Q, D]`.
    """
    logits = jnp.where(ok, logits, MASKED)
    top = jnp.maximum(logits.max((-2, -1)), MASKED / 2)  # so exp(MASKED − top) is 0 even where nothing may be read
    weights = jnp.exp(logits - top[..., None, None])
    return Partial(mix(weights), top, weights.sum((-2, -1)), (weights * logits).sum((-2, -1)))


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the union of two disjoint sets of keys, exactly."""
    top = jnp.maximum(a.top, b.top)
    x, y = jnp.exp(a.top - top), jnp.exp(b.top - top)
    out = a.out * x[..., None] + b.out * y[..., None]
    return Partial(out, top, a.mass * x + b.mass * y, a.moment * x + b.moment * y)


def merge_by(done: Partial, pages: Partial, mine_BHM) -> Partial:
    """`done [B, H, ...]` and the partials of pages `[B, M, ...]`, each merged into the heads that it is `mine` of."""
    top = jnp.where(mine_BHM[..., None], pages.top[:, None], MASKED / 2).max(2)  # [B, H, Q]
    top = jnp.maximum(done.top, top)
    weight = jnp.exp(jnp.where(mine_BHM[..., None], pages.top[:, None] - top[:, :, None], MASKED))  # [B, H, M, Q]
    own = jnp.exp(done.top - top)
    total = lambda x: jnp.einsum("bhmq,bmq->bhq", weight, x)
    out = done.out * own[..., None] + jnp.einsum("bhmq,bmqd->bhqd", weight, pages.out)
    return Partial(out, top, done.mass * own + total(pages.mass), done.moment * own + total(pages.moment))


def finish(p: Partial):
    """Normalises: output, log-sum-exp and entropy (nats). A row that read nothing gives 0, −inf, 0 and gradient 0."""
    empty = p.mass <= 0
    mass = jnp.where(empty, 1.0, p.mass)
    log_z = jnp.where(empty, 0.0, p.top) + jnp.log(mass)
    out = jnp.where(empty[..., None], 0.0, p.out / mass[..., None])
    entropy = jnp.where(empty, 0.0, log_z - p.moment / mass)
    return out, jnp.where(empty, -jnp.inf, log_z), entropy


def dense(
    query_BHQD: Float[Array, "B H Q D"],
    key_BHSD: Float[Array, "B H S D"],
    value_BHSD: Float[Array, "B H S D"],
    ok: Bool[Array, "..."],  # broadcasts to [B, H, Q, S]
    spec: AttentionSpec,
) -> Float[Array, "B H Q D"]:
    """The plain masked softmax that everything else is measured against; `ok` broadcasts to `[B, H, Q, S]`."""
    logits = spec.cap(jnp.einsum("bhqd,bhsd->bhqs", query_BHQD, key_BHSD) * spec.scale)
    weights = jax.nn.softmax(jnp.where(ok, logits, MASKED), -1)
    return jnp.einsum("bhqs,bhsd->bhqd", jnp.where(ok, weights, 0.0), value_BHSD)


def prefill(
    query_BTHGD: Float[Array, "B T H G D"],
    key_BHTD: Float[Array, "B H T D"],
    value_BHTD: Float[Array, "B H T D"],
    spec: AttentionSpec,
    query_block: int = PREFILL_BLOCK,
    key_block: int = PREFILL_BLOCK,
) -> Float[Array, "B T H G D"]:
    """Causal attention of a prompt over itself, exact, holding one block of one KV head's logits at a time.

    Blocks above the diagonal, or wholly before a local window, are not visited. Position is the index along T, so
    right-padded rows are right: a real token never sees a pad.
    """
    B, T, H, G, D = query_BTHGD.shape
    qb, kb = min(query_block, T), min(key_block, T)
    if T % qb or T % kb:
        raise ValueError(f"prompt bucket {T} is no multiple of the blocks {qb} and {kb}; use a power of two")
    blocks = T // qb

    def step(n):
        row, head, first = n // (H * blocks), n // blocks % H, n % blocks * qb
        query = lax.dynamic_slice(query_BTHGD, (row, first, head, 0, 0), (1, qb, 1, G, D)).reshape(qb * G, D)
        return _prefill_block(query * spec.scale, key_BHTD[row, head], value_BHTD[row, head], first, spec, qb, kb)

    out = lax.map(step, jnp.arange(B * H * blocks))
    return jnp.moveaxis(out.reshape(B, H, T, G, D), 1, 2)


def columns(query_BTHGD, key_BHTD, pos_BT, spec: AttentionSpec, query_block: int = 128) -> Float[Array, "B H T"]:
    """What each token of a prompt got of all attention: the sum over queries, the mean over a KV head's query heads.

    Exact, from whole rows of the causal softmax, one block of one KV head's queries at a time. Pads (EMPTY) give nothing.
    """
    B, T, H, G, D = query_BTHGD.shape
    block = min(query_block, T)

    def head(n):
        row, head = n // H, n % H
        key, pos = key_BHTD[row, head], pos_BT[row]

        def step(total, first):
            query = lax.dynamic_slice(query_BTHGD, (row, first, head, 0, 0), (1, block, 1, G, D))[0, :, 0]
            now = lax.dynamic_slice_in_dim(pos, first, block)[:, None]
            new = jnp.minimum(first, T - block) + jnp.arange(block)[:, None] >= first  # a last slice that is cut short moves back
            logits = spec.cap(jnp.einsum("qgd,td->qgt", query * spec.scale, key))
            weight = jax.nn.softmax(jnp.where(spec.sees(pos, now)[:, None], logits, MASKED), -1).mean(1)
            return total + jnp.where(new & (now >= 0), weight, 0.0).sum(0), None

        return lax.scan(step, jnp.zeros(T), jnp.arange(0, T, block))[0]

    return lax.map(head, jnp.arange(B * H)).reshape(B, H, T)


def _prefill_block(query_QD, key_TD, value_TD, first, spec: AttentionSpec, qb: int, kb: int):
    """The queries of `qb` tokens from position `first` on (Q / qb each): an online softmax over the key blocks they see."""
    Q, D = query_QD.shape
    now = jnp.repeat(first + jnp.arange(qb), Q // qb)[:, None]

    def block(j, done, masked: bool):
        out, top, mass = done
        key, value = (lax.dynamic_slice_in_dim(x, j * kb, kb) for x in (key_TD, value_TD))
        logits = spec.cap(query_QD @ key.T)
        if masked:
            logits = jnp.where(spec.sees(j * kb + jnp.arange(kb), now), logits, MASKED)
        new_top = jnp.maximum(top, logits.max(-1))
        weights, shrink = lax.optimization_barrier(jnp.exp(logits - new_top[:, None])), jnp.exp(top - new_top)
        return out * shrink[:, None] + weights @ value, new_top, mass * shrink + weights.sum(-1)

    start = 0 if spec.window is None else jnp.maximum(first - spec.window + 1, 0) // kb
    diagonal = first // kb if spec.window is None else start  # blocks before it need no mask
    flat = jnp.zeros(Q)
    done = jnp.zeros((Q, D)), flat + MASKED / 2, flat
    done = lax.fori_loop(start, diagonal, functools.partial(block, masked=False), done)
    out, _, mass = lax.fori_loop(diagonal, (first + qb - 1) // kb + 1, functools.partial(block, masked=True), done)
    return out / mass[:, None]


def rotary(pos: Int[Array, "..."], frequency: Any) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """Cosines and sines of the rotary embedding (https://arxiv.org/abs/2104.09864, eq. 34).

    `frequency [D/2]` is in radians per token (see `kvlab.models.config.Rope`).
    """
    angle = pos[..., None].astype(jnp.float32) * frequency
    return lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))  # computed once, not inside every use


def rotate(x: Float[Array, "... D"], cos: Array, sin: Array) -> Float[Array, "... D"]:
    """Rotates pairs (i, i + D/2) of the last axis; `cos` and `sin` broadcast to x's shape with D/2 at the end."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
