"""A list of words of which a few come up more often than the others."""

import dataclasses
from collections.abc import Mapping

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.asked import Asked, ask, room, steps
from kvlab.tasks.base import Batch, check, generator

QUESTION = "\n\nThe {} words that come up most often in this list are:"


class Counted(Asked):
    """Lists of words whose most frequent ones are asked for; no single place holds the answer, so there are no spans."""

    new_tokens: int | None

    def listed(self, tokenizer, rng, counts: Mapping[str, int], wanted: list[str], index: int) -> Batch:
        """The batch of one list in which each word comes up so many times, in an order that `rng` draws."""
        words = [word for word, n in counts.items() for _ in range(n)]
        pieces = [tokenizer.encode(f" {words[i]},") for i in rng.permutation(len(words))]
        question = [self.question(tokenizer, len(wanted))]
        prompts, rows, forced = ask([*tokenizer.begin, *sum(pieces, [])], question, self.known)
        facts = [{"context": index, "listed": len(words), "most": max(counts.values())}]
        answer = self.new_tokens or 4 + 2 * sum(len(tokenizer.encode(f" {word},")) for word in wanted)
        return Batch(prompts, rows, forced, steps(forced, answer), facts, [tuple(wanted)])

    def question(self, tokenizer, wanted: int) -> list[int]:
        return tokenizer.encode(QUESTION.format(wanted))


@dataclasses.dataclass(frozen=True)
class CommonWords(Counted):
    """`common` words that come up `often` among others that come up `seldom`, in each of `contexts` lists.

        context    notice, grant, source, grant, binary, notice, terms, grant, notice, …
        question   The 2 words that come up most often in this list are:     (fed token by token once the cache is filled)
        target     grant and notice, in any order; the share of them in the answer counts

    The common words of RULER (https://arxiv.org/abs/2404.06654, section 3.3). With the length, more seldom words come in.

    Fields:
      length: the most tokens of a list (with its question, where that is known).
      common, often, seldom: words asked for, how often each comes up, and how often each other does.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take; None for twice what the words take.
      text: where the words are from, see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 8
    common: int = 4
    often: int = 12
    seldom: int = 2
    known: bool = False
    new_tokens: int | None = None
    text: str = "licences"

    def __post_init__(self):
        check("common_words", contexts=(self.contexts, 1, None), common=(self.common, 1, 50), seldom=(self.seldom, 1, None))
        check("common_words", often=(self.often, self.seldom + 1, None), new_tokens=(self.new_tokens, 1, None))
        check("common_words", length=(self.length, 2 * self.common * self.often + 32, None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        usable = source.vocabulary(self.text)
        words = [usable[i] for i in rng.permutation(len(usable))]
        left = room(self, tokenizer, [self.question(tokenizer, self.common)])
        counts: dict[str, int] = {}
        for word in words:
            times = self.seldom if len(counts) >= self.common else self.often
            left -= times * len(tokenizer.encode(f" {word},"))
            if left < 0:
                break
            counts[word] = times
        if len(counts) <= self.common:
            raise ConfigError(
                f"common_words: length={self.length} holds {len(counts)} words if {self.common} come up {self.often} times each; "
                "raise length, or lower common or often"
            )
        return self.listed(tokenizer, rng, counts, words[: self.common], index)
