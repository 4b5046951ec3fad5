"""Random sequences for tests of parts: a ragged prompt with poisoned pads, the tokens after it, and what caches make of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import needs
from kvlab.attention import AttentionSpec
from kvlab.core import EMPTY, PAGE, Record
from kvlab.policy import Policy


@dataclasses.dataclass
class Sequence:
    """Random queries, keys and values of a whole sequence, and the record of its ragged prompt (pads are poison).

    Prompts' queries and what every token has besides serve retentions that need them.
    """

    lengths: np.ndarray
    steps: int
    key: np.ndarray  # [B, H, T + steps, D], by position
    value: np.ndarray
    query: np.ndarray  # [steps, B, H, G, D]
    record: Record
    spec: AttentionSpec
    prompt_query: np.ndarray  # [B, T, H, G, D], rotated
    hidden: np.ndarray  # [B, T + steps, E], by position
    out: np.ndarray  # the output projection, [E, H, G, D]

    def prompt(self, names) -> Record:
        """The record with what `names` ask for of `kvlab.needs`; importance, which takes a replay, is ∞."""
        T = self.prompt_query.shape[1]
        value = np.moveaxis(self.value, 1, 2)[:, :T]
        own = needs.of_tokens(needs.Pass(self.hidden[:, :T], value, self.out), names)
        frequency = 1e4 ** -np.linspace(0, 1, self.key.shape[-1] // 2, dtype=np.float32)
        given = needs.Prompt(jnp.asarray(self.prompt_query), self.record.key_BHTD, self.record.pos_BT, self.spec, frequency)
        return dataclasses.replace(self.record, seen={**own, **needs.of_prompt(given, names)})

    def later(self, names) -> dict:
        """What `names` ask for of the tokens that are appended, `[steps, B, 1 or H, ...]`, in the order of `appended`."""
        rows, at = np.arange(len(self.lengths)), self.lengths + np.arange(self.steps)[:, None]
        value = np.moveaxis(self.value, 1, 2)[rows, at]
        step = lambda hidden, value: needs.of_tokens(needs.Pass(hidden, value, self.out), names)
        return jax.vmap(step)(self.hidden[rows, at], value)

    def row(self, row: int) -> "Sequence":
        """One row alone, its prompt padded to whole pages and no further."""
        one, T = slice(row, row + 1), -(-int(self.lengths[row]) // PAGE) * PAGE
        record = Record(self.record.key_BHTD[one, :, :T], self.record.value_BHTD[one, :, :T], self.record.pos_BT[one, :T])
        return dataclasses.replace(
            self, lengths=self.lengths[one], key=self.key[one], value=self.value[one], query=self.query[:, one],
            record=record, prompt_query=self.prompt_query[one, :T], hidden=self.hidden[one],
        )  # fmt: skip


def sequence(lengths=(150, 97), bucket=192, steps=140, H=2, G=3, D=32, seed=0, spec=None) -> Sequence:
    rng: Any = np.random.default_rng(seed)
    B, lengths = len(lengths), np.array(lengths, np.int32)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    key, value = normal(B, H, bucket + steps, D), normal(B, H, bucket + steps, D)
    pos = np.where(np.arange(bucket) < lengths[:, None], np.arange(bucket), EMPTY)
    poison = lambda x: jnp.asarray(np.where(pos[:, None, :, None] < 0, 1e4, x[:, :, :bucket]).astype(np.float32))
    record = Record(poison(key), poison(value), jnp.asarray(pos))
    query, prompt_query = normal(steps, B, H, G, D), normal(B, bucket, H, G, D)
    prompt_query = np.where(pos[..., None, None, None] < 0, np.float32(1e4), prompt_query)
    hidden, out = normal(B, bucket + steps, 24), normal(24, H, G, D)
    return Sequence(lengths, steps, key, value, query, record, spec or AttentionSpec(D**-0.5), prompt_query, hidden, out)


@functools.partial(jax.jit, static_argnames="spec")
def decode(policy, cache, key, value, query, start, spec, given=None):
    """Appends and attends step by step: outputs, positions, reads, and the last cache. `given`: see `Sequence.later`."""

    def step(cache, x):
        k, v, q, i, own = x
        done = policy.attend(policy.append(cache, k, v, start + i, seen=own), q, start + i, spec)
        seen = {"out": done.out_BHQD, "lse": done.lse_BHQ, "pos": done.cache.pos, "entropy": done.info.entropy_BHQ}
        seen |= {"reads": done.info.reads_BH, "bound": done.info.bound_BH, "waiting": done.cache.waiting}
        return done.cache, seen

    return jax.lax.scan(step, cache, (key, value, query, jnp.arange(len(query)), given or {}))


@jax.jit
def append(policy, cache, key, value, pos, live=None):
    """Appends tokens `[steps, B, H, D]` at positions `[steps, B]` without attending."""

    def step(cache, x):
        return policy.append(cache, *x, live), None

    return jax.lax.scan(step, cache, (key, value, pos))[0]


def appended(s: Sequence):
    """Keys and values in the order in which rows append them, `[steps, B, H, D]`."""
    at = s.lengths[:, None] + np.arange(s.steps)
    pick = lambda x: np.stack([x[b][:, at[b]] for b in range(len(x))])  # [B, H, steps, D]
    return tuple(jnp.asarray(np.moveaxis(pick(x), 2, 0)) for x in (s.key, s.value))


def run(policy: Policy, s: Sequence, budget: int | None = None, own=None):
    """The first cache, the last one, and what was seen. With tokens' `own`, the record goes as it is: it holds what is needed."""
    total, names = int(s.lengths.max()) + s.steps, policy.retention.needs
    record, own = (s.record, own) if own else (s.prompt(names), s.later(names))
    cache = policy.fill(record, budget or policy.budget(int(s.lengths.max()), total))
    key, value = appended(s)
    last, seen = decode(policy, cache, key, value, jnp.asarray(s.query), jnp.asarray(s.lengths), s.spec, own)
    return cache, last, {k: np.asarray(v) for k, v in (seen | {"first": cache.pos}).items()}


def through(codec, rows, pos=None):
    """Rows `[n, D]` of one page (n ≤ 64, the rest zero) after a codec; `pos [n]` are their positions, in order by default."""
    pos = np.arange(len(rows)) if pos is None else pos
    page = np.pad(rows, ((0, PAGE - len(rows)), (0, 0)))[None, None, None]
    pos = jnp.asarray(np.pad(pos, (0, PAGE - len(rows)), constant_values=EMPTY), jnp.int32)[None, None, None]
    return np.asarray(_back(codec, _coded(codec, jnp.asarray(page), pos), pos))[0, 0, 0, : len(rows)]


@jax.jit
def _coded(codec, page, pos):
    return codec.encode(page, pos)


@jax.jit
def _back(codec, code, pos):
    return codec.output(codec.decode(code, pos))


def stored(policy: Policy, s: Sequence, pos, waiting, b, h):
    """Keys and values `[S, D]` of one row and head by slot: codes of full pages, waiting ones exact, zeros in empty slots."""
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for n, page in enumerate(pos[b, h]):
        rows = [np.where((page >= 0)[:, None], x[b, h, np.maximum(page, 0)], 0).astype(np.float32) for x in (s.key, s.value)]
        if not (policy.tailed and n in waiting[b, h]):
            rows = [through(c, x, page) for c, x in zip((policy.codec.keys, policy.codec.values), rows)]
        keys, values = [*keys, rows[0]], [*values, rows[1]]
    return np.concatenate(keys), np.concatenate(values)
