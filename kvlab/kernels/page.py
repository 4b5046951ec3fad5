"""One step of a kernel: the attention of a KV head's queries to a page, or to some tokens side by side, in registers.

All arrays have two axes. Queries, sums and values come in pieces along the head dimension, which hardware that wants powers
of two, or a layout that has tiles, can hold; keys and masks in rows of tokens. A plain page is one row of one piece.

Numbers that bfloat16 holds exactly are multiplied as such, by units made for it, and their scales stay apart: a scale of channels
goes into queries or sums, one of tokens into logits or weights. A float32 number is the sum of three in bfloat16, 8 bits each, so
queries and weights are cut in three, and only sums, which are float32, round. A head's parts lie in rows that products on a GPU
would pad with zeros (`Stack`): of logits each row gets the sum of the parts, outputs are added up outside. Cutting without error
is Ozaki's (https://doi.org/10.1007/s11075-011-9478-1), three of bfloat16 for one of float32 are Henry, Tang and Heinecke's
(https://arxiv.org/abs/1904.06376).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kvlab.attention import MASKED, AttentionSpec

NOW, SINKS, AFTER, LOCAL, COUNT, WAITING = range(6)  # columns of a kernel's facts, see `decode.facts`
UPPER = -(1 << 16)  # the bits of float32 that are bfloat16's


class Carry(NamedTuple):
    """What is known so far, as in `kvlab.attention.Partial`."""

    out: tuple[Any, ...]  # of each piece, [Q, w]; of each row's own part, see `Stack`
    top: Any  # [Q, 1]
    mass: Any  # [Q, 1]
    moment: Any  # [Q, 1]


class Numbers(NamedTuple):
    """A piece of some tokens' keys or values: `x`, in bfloat16 or float32, times what its tokens and its channels share."""

    x: Any  # keys [w, t], values [t, w]
    token: Any = None  # [1, t], or [1, 1] for all of them
    channel: Any = None  # [1, w]

    @property
    def narrow(self) -> bool:
        return self.x.dtype == jnp.bfloat16


class Row(NamedTuple):
    """Tokens side by side: which may be read, and their keys and values piece by piece."""

    ok: Any  # [1, t]
    keys: Sequence[Numbers]
    values: Sequence[Numbers]


class Stack(NamedTuple):
    """What the Q rows of queries are: row r is for part r // groups of the query of head r % groups; rows past `parts` are 0."""

    groups: int
    parts: int  # 3, or 1 where no numbers are narrow

    def own(self, x):
        """Of float32 numbers `[Q, n]`, the same in each part's rows, the bfloat16 part that is a row's own; they add up to x.

        They are cut off by a mask, 8 bits each of float32's 24. Rounded ones could be lost: a compiler may leave out a conversion
        to bfloat16 and back, as XLA may.
        """
        row = _along((x.shape[0], 1), 0)
        out = jnp.zeros(x.shape, jnp.float32)
        for part in range(self.parts):
            high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & UPPER, jnp.float32)
            out = jnp.where((row >= part * self.groups) & (row < (part + 1) * self.groups), high, out)
            x = x - high
        return out.astype(jnp.bfloat16)

    def first(self, x):
        """`x [Q, n]` in the rows of the first part, 0 in the others."""
        return x if self.parts == 1 else jnp.where(_along((x.shape[0], 1), 0) < self.groups, x, 0.0)

    def total(self, x):
        """`[Q, n]`: each row of a head gets the sum of all of them."""
        away = jnp.abs(_along((x.shape[0],) * 2, 0) - _along((x.shape[0],) * 2, 1))
        same = away == 0
        for part in range(1, self.parts):
            same = same | (away == part * self.groups)
        return dot(jnp.where(same, 1.0, 0.0), x)


def nothing(rows: int, widths: Sequence[int]) -> Carry:
    flat = jnp.zeros((rows, 1), jnp.float32)
    return Carry(tuple(jnp.zeros((rows, w), jnp.float32) for w in widths), flat + MASKED / 2, flat, flat)


def visible(pos, number, fact, waits: int):
    """Which tokens at `pos [1, t]` of pages `number` (one for all, or `[1, t]`) may be read from codes.

    `fact(i)` gives column i of the facts. Pages that wait in the tail, `waits` numbers of them, have no codes yet.
    """
    now = fact(NOW)
    ok = (pos >= 0) & (pos <= now) & ((pos < fact(SINKS)) | (pos > fact(AFTER))) & (pos > fact(LOCAL))
    for i in range(waits):
        ok = ok & (number != fact(WAITING + i))
    return ok


def div(a, b: int):
    """⌊a / b⌋ of integers that are not negative: jax's own rule for signs does not lower everywhere."""
    return lax.div(a, jnp.int32(b))


def dot(a, b):
    """A product that rounds neither factor and adds up in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def attend(done: Carry, query: Sequence[Any], rows: Sequence[Row], spec: AttentionSpec, stack: Stack):
    """`done` and the rows together, and the rows' own log-sum-exp `[Q, 1]` (below MASKED / 4 where nothing was read)."""
    logits = [jnp.where(row.ok, spec.cap(_scores(query, row.keys, stack)), MASKED) for row in rows]
    own = [x.max(axis=1, keepdims=True) for x in logits]
    top = done.top
    for x in own:
        top = jnp.maximum(top, x)
    weights = [jnp.exp(x - top) for x in logits]
    total = lambda parts: sum(x.sum(axis=1, keepdims=True) for x in parts)
    shrink, mass = jnp.exp(done.top - top), total(weights)
    moment = total(w * x for w, x in zip(weights, logits))
    mixed = lambda i: sum(_mix(w, row.values[i], stack) for w, row in zip(weights, rows))
    out = tuple(old * shrink + mixed(i) for i, old in enumerate(done.out))
    lse = jnp.where(mass > 0, top + jnp.log(jnp.where(mass > 0, mass, 1.0)), MASKED)
    return Carry(out, top, done.mass * shrink + mass, done.moment * shrink + moment), lse


def _scores(query: Sequence[Any], keys: Sequence[Numbers], stack: Stack):
    """`[Q, t]`, the same in all rows of a head."""
    found: Any = 0.0
    for q, k in zip(query, keys):
        q = q if k.channel is None else q * k.channel
        found = found + dot(stack.own(q) if k.narrow else q, k.x)
    found = stack.total(found) if keys[0].narrow else found
    return found if keys[0].token is None else found * keys[0].token


def _mix(weight, value: Numbers, stack: Stack):
    """`[Q, w]`, which the rows of a head add up to."""
    weight = weight if value.token is None else weight * value.token
    out = dot(stack.own(weight) if value.narrow else stack.first(weight), value.x)
    return out if value.channel is None else out * value.channel


def _along(shape, axis: int):
    return lax.broadcasted_iota(jnp.int32, shape, axis)
