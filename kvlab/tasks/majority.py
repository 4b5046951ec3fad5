"""Votes hidden in a long text: an answer needs all of them."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks.asked import Asked, ask, hide, steps
from kvlab.tasks.base import Batch, check, generator
from kvlab.tasks.needle import CITIES

COLOURS = "red blue green black white yellow".split()
VOTE = " The vote of {} is {}. "
QUESTION = "\n\nThe vote of most cities is"


@dataclasses.dataclass(frozen=True)
class Majority(Asked):
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
      known: the question is part of the prompt.
      late: the votes that did not win are the last ones, so that whoever reads the end of the context is misled.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 8
    votes: int = 15
    share: float = 0.8
    colours: int = 2
    known: bool = False
    late: bool = False
    text: str = "licences"

    def __post_init__(self):
        if not (2 <= self.colours <= len(COLOURS) and self.colours <= self.votes <= len(CITIES)):
            raise ConfigError(
                f"majority: colours={self.colours}, votes={self.votes}; allowed: colours 2 … {len(COLOURS)}, "
                f"votes from colours to {len(CITIES)}"
            )
        check("majority", contexts=(self.contexts, 1, None), length=(self.length, 20 * (self.votes + 1), None))
        first, second, *_ = self.counts()
        if not (0 < self.share <= 1 and first > second):
            raise ConfigError(f"majority: share={self.share} gives {first} votes against {second}; give a share that wins")

    def counts(self) -> list[int]:
        """Votes for each colour, the winner first."""
        first = round(self.votes * self.share)
        others = self.colours - 1
        return [first, *((self.votes - first + i) // others for i in range(others - 1, -1, -1))]

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        colours = rng.choice(COLOURS, self.colours, replace=False).tolist()
        cast = [colour for colour, n in zip(colours, self.counts()) for _ in range(n)]
        cast = cast if self.late else rng.permutation(cast).tolist()
        cities = rng.choice(CITIES, self.votes, replace=False).tolist()
        pieces = [tokenizer.encode(VOTE.format(city, colour)) for city, colour in zip(cities, cast)]
        question = [tokenizer.encode(QUESTION)]
        context, _ = hide(self, tokenizer, rng, pieces, question)
        prompts, rows, forced = ask(context, question, self.known)
        return Batch(prompts, rows, forced, steps(forced, 3), [{"context": index, "last_vote": cast[-1]}], [colours[0]])
