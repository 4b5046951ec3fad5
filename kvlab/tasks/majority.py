"""Votes hidden in a long text: an answer needs all of them."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.base import Batch, Task, generator
from kvlab.tasks.needle import CITIES

COLOURS = "red blue green black white yellow".split()
VOTE = " The vote of {} is {}. "
QUESTION = "\n\nThe vote of most cities is"


@dataclasses.dataclass(frozen=True)
class Majority(Task):
    """`votes` votes for a few colours in each of `contexts` texts; what most voted for is asked for, from the filled cache.

        context    … [The vote of Lima is red.] … text … [The vote of Oslo is blue.] … [The vote of Rome is red.] …
        question   The vote of most cities is        (fed token by token once the cache is filled)
        target     red

    No single place holds the answer: a query that reads a part of the votes sees another count. The question has the words of a
    vote, because a small base model goes on with a pattern and answers no question about it. Chance is one in `colours`;
    colours that did not win share the other votes evenly. A large `share` also makes the last vote a good guess
    (`last_vote` in the results tells which it was), unless `late` puts the losing votes there. With the full cache
    SmolLM2-135M was right in 6 of 8 contexts of 500 tokens with late votes, and in 16 of 16 with mixed ones.

    Fields:
      length: tokens of a context.
      votes, share: votes in a context, and the winner's share of them.
      colours: how many there are to vote for.
      late: the votes that did not win are the last ones, so that whoever reads the end of the context is misled.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 8
    votes: int = 15
    share: float = 0.8
    colours: int = 2
    late: bool = False
    text: str = "licences"

    def __post_init__(self):
        if not (2 <= self.colours <= len(COLOURS) and self.colours <= self.votes <= len(CITIES)):
            raise ConfigError(
                f"majority: colours={self.colours}, votes={self.votes}; allowed: colours 2 … {len(COLOURS)}, "
                f"votes from colours to {len(CITIES)}"
            )
        least = 20 * (self.votes + 1)
        if self.contexts < 1 or self.length < least:
            raise ConfigError(
                f"majority: contexts={self.contexts}, length={self.length}; allowed: contexts 1 and more, "
                f"length at least {least} for {self.votes} votes"
            )
        first, second, *_ = self.counts()
        if not (0 < self.share <= 1 and first > second):
            raise ConfigError(f"majority: share={self.share} gives {first} votes against {second}; give a share that wins")

    def counts(self) -> list[int]:
        """Votes for each colour, the winner first."""
        first = round(self.votes * self.share)
        others = self.colours - 1
        return [first, *((self.votes - first + i) // others for i in range(others - 1, -1, -1))]

    def count(self) -> int:
        return self.contexts

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        colours = rng.choice(COLOURS, self.colours, replace=False).tolist()
        cast = [colour for colour, n in zip(colours, self.counts()) for _ in range(n)]
        cast = cast if self.late else rng.permutation(cast).tolist()
        cities = rng.choice(CITIES, self.votes, replace=False).tolist()
        pieces = [tokenizer.encode(VOTE.format(city, colour)) for city, colour in zip(cities, cast)]
        begin = list(tokenizer.begin)
        room = self.length - len(begin) - sum(map(len, pieces))
        context, _ = source.insert(source.token_stream(self.text, tokenizer, rng, room)[:room], pieces)
        question = tokenizer.encode(QUESTION)
        facts = [{"context": index, "last_vote": cast[-1]}]
        return Batch([begin + context], [0], [question], len(question) + 3, facts, [colours[0]])

    def score(self, batch, answers, logits, reference):
        return [
            {"answer": answer, "target": target, "correct": answer.strip().startswith(target)}
            for answer, target in zip(answers, batch.targets)
        ]

    def summary(self, rows):
        return {"accuracy": sum(r["correct"] for r in rows) / len(rows), "samples": len(rows)}
