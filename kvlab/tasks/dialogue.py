"""A conversation in which something was said early on that is asked for late."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.asked import Asked, ask, find, steps
from kvlab.tasks.base import Batch, check, generator
from kvlab.tasks.needle import CITIES

FACT, HEARD = "Please remember that my friend in {} has the number {}.", "I will remember that."
PASSAGE, READ = "Here is something I read: {}", "Thank you, I have read it."
QUESTION, LEAD = "Which number does my friend in {} have?", "Your friend in {} has the number"
EARLY = 0.5  # without a depth, facts are spread over this first share of the turns

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Dialogue(Asked):
    """`facts` facts, one a turn, in the first half of each of `contexts` conversations; each is asked for in the last turn.

        context    User: Here is something I read: …              Assistant: Thank you, I have read it.
                   User: Please remember that my friend in Oslo has the number 48213.   Assistant: I will remember that.
                   User: Here is something I read: …              Assistant: Thank you, I have read it.       …
        question   Which number does my friend in Oslo have?      Assistant: Your friend in Oslo has the number
        target     48213

    In the words of the model's own chat template, where it has one, otherwise as plain text. The context ends where the question
    begins, and the question is fed token by token.

    Fields:
      length: the most tokens of a context (with its question, where that is known).
      facts: said in a conversation and asked for.
      depth: after which share of the other turns they are said, 0 … 1; None spreads them over the first half.
      turn: tokens of a passage, so that fewer make more turns.
      plain: plain text, whatever the model has.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take.
      text: of the passages, see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    facts: int = 4
    depth: float | None = None
    turn: int = 64
    plain: bool = False
    known: bool = False
    new_tokens: int = 8
    text: str = "licences"

    def __post_init__(self):
        check("dialogue", contexts=(self.contexts, 1, None), facts=(self.facts, 1, len(CITIES)), depth=(self.depth, 0, 1))
        check("dialogue", turn=(self.turn, 1, None), new_tokens=(self.new_tokens, 1, None))
        check("dialogue", length=(self.length, 40 * (self.facts + 1), None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        cities = rng.choice(CITIES, self.facts, replace=False).tolist()
        numbers = [str(n) for n in rng.integers(10_000, 100_000, self.facts)]
        said = [FACT.format(city, number) for city, number in zip(cities, numbers)]
        hay = source.token_stream(self.text, tokenizer, rng, self.length)
        render = None if self.plain else getattr(tokenizer, "render", None)
        make = lambda n, city: self._split(tokenizer, render, self.turns(tokenizer, hay, said, n), city)
        fits = lambda n: sum(map(len, make(n, cities[0])[: 1 + self.known])) <= self.length
        n = bisect_left(range(1, 2 * self.length // self.turn + 2), True, key=lambda n: not fits(n))
        if n < 1:
            raise ConfigError(
                f"dialogue: length={self.length} holds no turn besides {self.facts} facts; raise length or lower facts or turn"
            )
        questions = [make(n, city)[1] for city in cities]
        context = make(n, cities[0])[0]
        spans = []
        for sentence, number in zip(said, numbers):
            first, end = find(tokenizer, context, sentence)
            spans.append(find(tokenizer, context[first:end], number, first))
        facts = [
            {"context": index, "needle": city, "depth": round(first / len(context), 4), "turns": n + self.facts}
            for city, (first, _) in zip(cities, spans)
        ]
        prompts, rows, forced = ask(context, questions, self.known)
        return Batch(prompts, rows, forced, steps(forced, self.new_tokens), facts, numbers, spans)

    def turns(self, tokenizer, hay: list[int], said: list[str], n: int) -> list[tuple[str, str]]:
        """What the user says and what is answered, in `n` turns with passages and one for each fact."""
        made = []
        places = [((i + 0.5) / len(said) * EARLY if self.depth is None else self.depth) * n for i in range(len(said))]
        for i in range(n + 1):
            made += [(fact, HEARD) for fact, place in zip(said, places) if int(place) == i]
            if i < n:
                passage = " ".join(tokenizer.decode(hay[i * self.turn : (i + 1) * self.turn]).split())
                made.append((PASSAGE.format(passage), READ))
        return made

    def _split(self, tokenizer, render: Callable | None, turns, city: str) -> tuple[list[int], list[int]]:
        """Tokens of a conversation up to the question, and of the question with the beginning of its answer."""
        question = QUESTION.format(city)
        messages: list[Message] = []
        for user, assistant in (*turns, (question, "")):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        whole = (render or plain)(messages[:-1])
        cut = whole.rindex(question)
        begin = [] if render else list(tokenizer.begin)  # a template brings its own
        lead = LEAD.format(city) if whole[-1].isspace() else f" {LEAD.format(city)}"
        return begin + tokenizer.encode(whole[:cut]), tokenizer.encode(whole[cut:] + lead)


def plain(messages: list[Message]) -> str:
    """A conversation as lines of plain text, ready for the assistant's answer."""
    return "".join(f"{message['role'].title()}: {message['content']}\n" for message in messages) + "Assistant:"
