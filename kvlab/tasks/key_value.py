"""A store of pairs and nothing else, and keys to look up in it."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks.asked import Asked, ask, find, room, steps
from kvlab.tasks.base import Batch, check, generator

DIGITS = 6  # of keys and values, hexadecimal


@dataclasses.dataclass(frozen=True)
class KeyValue(Asked):
    """A JSON object as the whole of each of `contexts` contexts; `queries` of its keys are looked up from one filled cache.

        context    {"3fa9c1": "77e01b", "90b2dd": "c41f08", … "e5501a": "02d9ce"}
        question   "90b2dd": "                        (fed token by token once the cache is filled)
        target     c41f08

    After the retrieval of https://arxiv.org/abs/2307.03172 (section 3) and multi-key needles of RULER
    (https://arxiv.org/abs/2404.06654, section 3.1): every other pair is a distractor.

    Fields:
      length: the most tokens of a context (with its question, where that is known).
      pairs: in a context; None for as many as fit.
      queries: pairs that are asked for, one a question.
      depth: where those stand among the others, 0 … 1; None spreads them evenly.
      alike: first digits that all keys share, so that more of a key has to be read to tell it from the others.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take.
    """

    length: int = 2048
    contexts: int = 4
    pairs: int | None = None
    queries: int = 8
    depth: float | None = None
    alike: int = 0
    known: bool = False
    new_tokens: int = 8

    def __post_init__(self):
        check("key_value", contexts=(self.contexts, 1, None), depth=(self.depth, 0, 1), alike=(self.alike, 0, DIGITS - 2))
        check("key_value", pairs=(self.pairs, 1, 16 ** (DIGITS - self.alike)), new_tokens=(self.new_tokens, 1, None))
        check("key_value", queries=(self.queries, 1, self.pairs), length=(self.length, 32, None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        keys, values = self._drawn(rng)
        ask_for = lambda key: tokenizer.encode(f'\n\n"{key}": "')
        opening, closing = [*tokenizer.begin, *tokenizer.encode("{")], tokenizer.encode("}")
        left = room(self, tokenizer, [ask_for(keys[0])], len(opening) + len(closing))
        pieces = self._fitting(tokenizer, keys, values, left)
        n, q = len(pieces), self.queries
        spread = [int((i + 0.5) / q * n) for i in range(q)]
        chosen = spread if self.depth is None else [int(self.depth * (n - q)) + i for i in range(q)]
        starts = [len(opening) + sum(map(len, pieces[:i])) for i in chosen]
        context = opening + sum(pieces, []) + closing
        questions = [ask_for(keys[i]) for i in chosen]
        spans = [find(tokenizer, pieces[i], values[i], start) for i, start in zip(chosen, starts)]
        facts = [
            {"context": index, "key": keys[i], "depth": round(start / len(context), 4), "pairs": n}
            for i, start in zip(chosen, starts)
        ]
        prompts, rows, forced = ask(context, questions, self.known)
        return Batch(prompts, rows, forced, steps(forced, self.new_tokens), facts, [values[i] for i in chosen], spans)

    def _drawn(self, rng) -> tuple[list[str], list[str]]:
        """Keys, all different, and values: as many as are wanted or could fit."""
        free = DIGITS - self.alike
        n = self.pairs or min(16**free, self.length // 4)
        shared = f"{rng.integers(16**DIGITS):0{DIGITS}x}"[: self.alike]
        keys = [f"{shared}{key:0{free}x}" for key in rng.choice(16**free, n, replace=False)]
        return keys, [f"{value:0{DIGITS}x}" for value in rng.integers(16**DIGITS, size=n)]

    def _fitting(self, tokenizer, keys: list[str], values: list[str], left: int) -> list[list[int]]:
        """The pairs as tokens, as far as they fit. Errors: ConfigError where fewer fit than are wanted."""
        pieces = []
        for key, value in zip(keys, values):
            piece = tokenizer.encode(f'"{key}": "{value}", ')
            left -= len(piece)
            if left < 0:
                break
            pieces.append(piece)
        wanted = self.pairs or self.queries
        if len(pieces) < wanted:
            raise ConfigError(
                f"key_value: length={self.length} holds {len(pieces)} pairs; allowed: pairs and queries up to those"
            )
        return pieces
