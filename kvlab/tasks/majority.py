"""Votes hidden in a long text: an answer needs all of them."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.base import Batch, Task, generator
from kvlab.tasks.needle import CITIES

COLOURS = "red blue green black white yellow".split()
VOTE = " The vote of {} is {}. "
QUESTION = "\n\nThe vote of {} is"
ASKED = ("Bern", "Riga", "Lyon", "Kyiv", "Pisa", "Oporto")  # none of them is among CITIES, so none has voted


@dataclasses.dataclass(frozen=True)
class Majority(Task):
    """`votes` votes for a few colours in each of `contexts` texts; what most voted for is asked for, from the filled cache.

        context    … [The vote of Lima is red.] … text … [The vote of Oslo is blue.] … [The vote of Rome is red.] …
        question   The vote of Bern is        (a city that has not voted; fed token by token once the cache is filled)
        target     red

    No single place holds the answer: a query that reads a part of the votes sees another count. The question asks for one
    more vote, because a small base model continues a pattern by what was most frequent in it, and answers no question about
    it. Chance is one in `colours`; colours that did not win share the other votes evenly.

    Fields:
      length: tokens of a context.
      votes, share: votes in a context, and the winner's share of them.
      colours: how many there are to vote for.
      asked: questions to each context, each about another city.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 8
    votes: int = 15
    share: float = 0.6
    colours: int = 3
    asked: int = 1
    text: str = "licences"

    def __post_init__(self):
        if not (2 <= self.colours <= len(COLOURS) and self.colours <= self.votes <= len(CITIES)):
            raise ConfigError(
                f"majority: colours={self.colours}, votes={self.votes}; allowed: colours 2 … {len(COLOURS)}, "
                f"votes from colours to {len(CITIES)}"
            )
        if not 1 <= self.asked <= len(ASKED) or self.contexts < 1 or self.length < 20 * (self.votes + 1):
            raise ConfigError(
                f"majority: asked={self.asked}, contexts={self.contexts}, length={self.length}; allowed: asked 1 … "
                f"{len(ASKED)}, contexts 1 and more, length at least {20 * (self.votes + 1)} for {self.votes} votes"
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
        cast = rng.permutation([colour for colour, n in zip(colours, self.counts()) for _ in range(n)]).tolist()
        cities = rng.choice(CITIES, self.votes, replace=False).tolist()
        pieces = [tokenizer.encode(VOTE.format(city, colour)) for city, colour in zip(cities, cast)]
        begin = list(tokenizer.begin)
        room = self.length - len(begin) - sum(map(len, pieces))
        context, _ = source.insert(source.token_stream(self.text, tokenizer, rng, room)[:room], pieces)
        questions = [tokenizer.encode(QUESTION.format(city)) for city in ASKED[: self.asked]]
        facts = [{"context": index, "asked": city, "last_vote": cast[-1]} for city in ASKED[: self.asked]]
        steps = max(map(len, questions)) + 3
        return Batch([begin + context], [0] * self.asked, questions, steps, facts, [colours[0]] * self.asked)

    def score(self, batch, answers, logits, reference):
        return [
            {"answer": answer, "target": target, "correct": answer.strip().startswith(target)}
            for answer, target in zip(answers, batch.targets)
        ]

    def summary(self, rows):
        return {"accuracy": sum(r["correct"] for r in rows) / len(rows), "samples": len(rows)}
