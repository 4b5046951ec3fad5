"""What a gate picks for many queries of a sequence: the selection's own scores and choice, and smooth stand-ins for it."""

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.core import PAGE
from kvlab.selection import choose
from kvlab.selection.gated import Gated, windowed


def scores(selection: Gated, query_BQHGD, key_BHTD, now_BQ):
    """Scores `[B, H, Q, T]` of tokens at positions 0 … T−1 for queries at `now`, and which of them the queries see.

    Index keys are rounded as the selection stores them; the rounding passes gradients on.
    """
    T = key_BHTD.shape[2]
    ok_BQT = jnp.arange(T) <= now_BQ[..., None]
    index = selection.layer.index(key_BHTD, jnp.arange(T))
    index = index + lax.stop_gradient(selection.unpack(selection.pack(index)) - index)
    head = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], key_BHTD.shape[1], *x.shape[1:]))
    one = lambda query, ok, now: selection.layer.scores(query, index, head(ok), head(now))
    found = jax.vmap(one, (1, 1, 1), 2)(query_BQHGD, ok_BQT, now_BQ)
    ok = head(ok_BQT)
    pages = lambda x: x.reshape(*x.shape[:-1], T // PAGE, PAGE)
    return windowed(pages(found), pages(ok), selection.flattening).reshape(found.shape), ok


def hard(selection: Gated, score_BHQT, ok_BHQT, sparsity):
    """What is read, exactly as while decoding at this sparsity: bool `[B, H, Q, T]`."""
    pos = jnp.broadcast_to(jnp.arange(score_BHQT.shape[-1]), score_BHQT.shape)
    length = ok_BHQT.sum(-1, dtype=jnp.int32)
    number = length if selection.mode == "threshold" else choose.count(length, sparsity, selection.max_k)[0]
    return selection.keep(score_BHQT, ok_BHQT, pos, number)


def soft(selection: Gated, score_BHQT, ok_BHQT, picked_BHQT, width: float):
    """A sigmoid around the border of what was picked, `[B, H, Q, T]`; 1 for tokens that are read whatever their score.

    The border lies midway between the last score that was picked and the first that was not, or at the gate's threshold.
    """
    pos = jnp.broadcast_to(jnp.arange(score_BHQT.shape[-1]), score_BHQT.shape)
    forced = selection.forced(ok_BHQT, pos, picked_BHQT.sum(-1, dtype=jnp.int32))
    if selection.mode == "threshold":
        border = selection.layer.threshold_H[:, None, None]
    else:
        inside = jnp.where(picked_BHQT & ~forced, score_BHQT, jnp.inf).min(-1, keepdims=True)
        outside = jnp.where(ok_BHQT & ~picked_BHQT, score_BHQT, -jnp.inf).max(-1, keepdims=True)
        middle = (jnp.where(jnp.isfinite(inside), inside, outside) + jnp.where(jnp.isfinite(outside), outside, inside)) / 2
        border = lax.stop_gradient(jnp.where(jnp.isfinite(middle), middle, 0.0))
    smooth = jax.nn.sigmoid((score_BHQT - border) / width)
    return jnp.where(ok_BHQT, jnp.where(forced, 1.0, smooth), 0.0)


def straight_through(picked_BHQT, soft_BHQT):
    """The hard choice forward, the sigmoid's gradient backward."""
    return picked_BHQT + soft_BHQT - lax.stop_gradient(soft_BHQT)
