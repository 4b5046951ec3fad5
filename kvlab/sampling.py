"""From logits to the next token: greedy, or drawn under per-row settings with a key per row.

All settings are arrays, so a batch may mix them and a change never compiles anew. A row's draw depends on its own key and
position only: it samples the same tokens alone and in any batch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.core import part
from kvlab.errors import ConfigError

RANGES = {  # what is allowed: (test, words)
    "temperature": (lambda x: x >= 0, "≥ 0 (0 takes the likeliest token)"),
    "top_k": (lambda x: (x >= 0) & (x == np.round(x)), "whole numbers ≥ 0 (0 keeps all)"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "0 < top_p ≤ 1"),
    "min_p": (lambda x: (x >= 0) & (x < 1), "0 ≤ min_p < 1"),
    "repetition_penalty": (lambda x: x > 0, "> 0 (1 is none)"),
}


@part
class Sampling:
    """How rows draw their tokens; every field is a number for all rows or a sequence with one per row.

    In this order: repetition penalty (https://arxiv.org/abs/1909.05858, section 4.1: logits of tokens seen before are divided
    by it where positive, multiplied where negative), temperature, top-k, top-p of what is left (nucleus,
    https://arxiv.org/abs/1904.09751, eq. 2–3), min-p (tokens at least min_p as likely as the likeliest,
    https://arxiv.org/abs/2407.01082). Errors: ConfigError, in `rows`.
    """

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0

    def rows(self, batch: int) -> "Sampling":
        """The same with checked float arrays `[B]`."""
        made = {}
        for name, (allowed, words) in RANGES.items():
            given = getattr(self, name)
            value = np.asarray(given, np.float32)
            if value.shape not in ((), (batch,)) or not np.all(allowed(value)):
                raise ConfigError(f"sampling: {name}={given}; allowed: {words}, one number or one for each of {batch} rows")
            made[name] = jnp.asarray(np.broadcast_to(value, batch))
        return Sampling(**made)


def keys(seed: int | Sequence[int], batch: int):
    """A key per row: of its own seed, or of one seed and the row's number."""
    seeds = np.asarray(seed)
    if seeds.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(int(seeds)), jnp.arange(batch))
    if len(seeds) != batch:
        raise ConfigError(f"{len(seeds)} seeds for {batch} rows; give one number, or one for each row")
    return jax.vmap(jax.random.key)(jnp.asarray(seeds))


def filtered(sampling: Sampling, logits_BV, seen_BV):
    """Logits after penalty, temperature and filters; tokens that may not be drawn have −inf."""
    column = lambda x: x[:, None]
    penalty = column(sampling.repetition_penalty)
    logits = jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)
    logits = logits / jnp.maximum(column(sampling.temperature), 1e-6)
    V = logits.shape[-1]
    top = jnp.sort(logits, -1)[:, ::-1]
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V).astype(jnp.int32)
    kept = jnp.where(jnp.arange(V) < column(k), top, -jnp.inf)
    before = jnp.cumsum(jax.nn.softmax(kept, -1), -1) - jax.nn.softmax(kept, -1)  # probability of the likelier ones
    inside = (before < column(sampling.top_p)) | (column(sampling.top_p) >= 1)
    last = jnp.minimum(k, inside.sum(-1)) - 1
    least = jnp.take_along_axis(top, column(jnp.maximum(last, 0)), 1)
    least = jnp.maximum(least, top[:, :1] + jnp.log(column(sampling.min_p)))
    return jnp.where(logits >= least, logits, -jnp.inf)


def draw(sampling: Sampling | None, logits_BV, seen_BV, key_B, pos_B):
    """The next token of each row `[B]`: the likeliest, or a draw with the row's key folded with its position."""
    if sampling is None:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    logits = filtered(sampling, logits_BV, seen_BV)
    noise = jax.vmap(lambda key, pos: jax.random.gumbel(jax.random.fold_in(key, pos), logits.shape[-1:]))(key_B, pos_B)
    noisy = jnp.where(sampling.temperature[:, None] > 0, logits + noise, logits)
    return jnp.argmax(noisy, -1).astype(jnp.int32)
