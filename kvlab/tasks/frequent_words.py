"""A list of made-up words, fewer and fewer of each."""

import dataclasses
from bisect import bisect_left

import numpy as np

from kvlab.errors import ConfigError
from kvlab.tasks.asked import room
from kvlab.tasks.base import Batch, check, generator
from kvlab.tasks.common_words import Counted

SYLLABLES = [c + v for c in "bdfgklmnprstvwz" for v in "aeiou"]


@dataclasses.dataclass(frozen=True)
class FrequentWords(Counted):
    """`words` made-up words in each of `contexts` lists, the k-th in proportion to k^−alpha; the `top` first are asked for.

        context    zopiku, ralemi, zopiku, zopiku, gatuve, ralemi, zopiku, …
        question   The 2 words that come up most often in this list are:     (fed token by token once the cache is filled)
        target     zopiku and ralemi, in any order; the share of them in the answer counts

    The frequent words of RULER (https://arxiv.org/abs/2404.06654, section 3.3). The smaller `alpha`, the closer the counts.

    Fields:
      length: the most tokens of a list (with its question, where that is known).
      words, top: different words in a list, and how many of them are asked for.
      alpha: how fast counts fall.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take; None for twice what the words take.
    """

    length: int = 2048
    contexts: int = 8
    words: int = 30
    top: int = 3
    alpha: float = 1.5
    known: bool = False
    new_tokens: int | None = None

    def __post_init__(self):
        check("frequent_words", contexts=(self.contexts, 1, None), words=(self.words, 2, 1000), top=(self.top, 1, self.words - 1))
        check("frequent_words", alpha=(self.alpha, 0.1, 10), new_tokens=(self.new_tokens, 1, None))
        check("frequent_words", length=(self.length, 2 * self.words + 32, None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        n = len(SYLLABLES)
        drawn = rng.choice(n**3, self.words, replace=False)
        words = [SYLLABLES[i // n**2] + SYLLABLES[i // n % n] + SYLLABLES[i % n] for i in drawn]
        cost = np.array([len(tokenizer.encode(f" {word},")) for word in words])
        left = room(self, tokenizer, [self.question(tokenizer, self.top)])
        total = bisect_left(range(1, left + 1), True, key=lambda total: self.counts(total) @ cost > left)
        counts = self.counts(total)
        if counts @ cost > left or counts[self.top - 1] == counts[self.top]:
            raise ConfigError(
                f"frequent_words: in length={self.length} words {self.top} and {self.top + 1} come up equally often, "
                "or not all fit; raise length or alpha, or lower top or words"
            )
        return self.listed(tokenizer, rng, dict(zip(words, counts.tolist())), words[: self.top], index)

    def counts(self, total: int) -> np.ndarray:
        """How often each word comes up in a list of about `total`, at least once."""
        share = np.arange(1, self.words + 1) ** -float(self.alpha)
        return np.maximum(1, np.round(total * share / share.sum())).astype(int)
