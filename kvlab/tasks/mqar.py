"""Pairs of a key and a value between noise, and keys to recall the values of."""

import dataclasses
from typing import NamedTuple

import numpy as np

from kvlab.errors import ConfigError
from kvlab.tasks.asked import Asked, ask
from kvlab.tasks.base import Batch, generator

NOISE, KEYS, VALUES = 64, 96, 96  # words of each kind; their ids follow one another in this order
WORDS = [f"{kind}{i}" for kind, count in (("n", NOISE), ("k", KEYS), ("v", VALUES)) for i in range(count)]


class Recall(NamedTuple):
    """Rows of token ids: contexts `[B, T]`, keys asked for `[B, Q]`, their values `[B, Q]`, where each pair lies `[B, Q]`."""

    context_BT: np.ndarray
    query_BQ: np.ndarray
    target_BQ: np.ndarray
    start_BQ: np.ndarray


def sample(rng: np.random.Generator, rows: int, length: int, pairs: int, queries: int) -> Recall:
    """Draws contexts with `pairs` pairs in random places (keys of a row differ) and asks for `queries` of them."""
    key = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :pairs] + NOISE
    value = rng.integers(NOISE + KEYS, NOISE + KEYS + VALUES, (rows, pairs))
    places = np.tile(np.arange(length - pairs), (rows, 1))  # a pair is one place, as a noise token is
    start = np.sort(rng.permuted(places, axis=1)[:, :pairs], 1) + np.arange(pairs)
    context = rng.integers(0, NOISE, (rows, length))
    np.put_along_axis(context, start, key, 1)
    np.put_along_axis(context, start + 1, value, 1)
    asked = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)[:, :queries]
    pick = lambda x: np.take_along_axis(x, asked, 1)
    return Recall(context.astype(np.int32), pick(key), pick(value), pick(start))


@dataclasses.dataclass(frozen=True)
class Mqar(Asked):
    """Multi-query associative recall (https://arxiv.org/abs/2312.04927, section 3.1), every query from the same filled cache.

        context    n5 k17 v3 n60 n2 k4 v90 n8 … k71 v3 n41        (noise n, pairs k v; compressed by the policy)
        query      k4                                             (fed once the cache is filled)
        target     v90

    For models whose vocabulary is the one in `WORDS`, such as tiny-recall.

    Fields:
      length: tokens of a context.
      contexts: how many there are, each a batch.
      pairs, queries: pairs in a context, and how many of them are asked for, each in a row of its own.
      known: the key that is asked for ends the prompt, as one more token.
    """

    length: int = 1024
    contexts: int = 4
    pairs: int = 64
    queries: int = 32
    known: bool = False

    def __post_init__(self):
        most = min(KEYS, self.length // 2)
        if not 1 <= self.pairs <= most:
            raise ConfigError(
                f"mqar: pairs={self.pairs}; allowed: 1 … {most} (half of length={self.length}, at most {KEYS} keys)"
            )
        if not 1 <= self.queries <= self.pairs:
            raise ConfigError(f"mqar: queries={self.queries}; allowed: 1 … {self.pairs}, each pair is asked for at most once")
        if self.contexts < 1:
            raise ConfigError(f"mqar: contexts={self.contexts}; allowed: 1 and more")

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        check(tokenizer)
        drawn = Recall(*(x[0] for x in sample(generator(seed, index), 1, self.length, self.pairs, self.queries)))
        facts = [
            {"context": index, "key": WORDS[key], "depth": round(int(start) / self.length, 4)}
            for key, start in zip(drawn.query_BQ, drawn.start_BQ)
        ]
        questions = [[int(key)] for key in drawn.query_BQ]
        targets = [WORDS[value] for value in drawn.target_BQ]
        spans = [(int(start) + 1, int(start) + 2) for start in drawn.start_BQ]
        prompts, rows, forced = ask(drawn.context_BT.tolist(), questions, self.known)
        return Batch(prompts, rows, forced, 1, facts, targets, spans)

    def mark(self, answer, target):
        return {"correct": answer.strip() == target}


def check(tokenizer) -> None:
    """Errors: ConfigError for a tokenizer with other words or another order."""
    first = [NOISE + KEYS - 1, NOISE - 1, len(WORDS) - 1]
    if tokenizer.encode(" ".join(WORDS[i] for i in first)) != first:
        raise ConfigError('mqar: the model\'s vocabulary is not that of the task; write model = { name = "tiny-recall" }')
