"""Facts hidden in a long text, asked for one by one."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.base import Batch, Task, generator

CITIES = """Amsterdam Ankara Athens Baghdad Bangkok Barcelona Beijing Belgrade Berlin Bogota Boston Brussels Budapest
Cairo Chicago Copenhagen Dakar Damascus Delhi Dublin Edinburgh Florence Geneva Hamburg Hanoi Havana Helsinki Istanbul
Jakarta Jerusalem Kabul Karachi Kyoto Lagos Lima Lisbon London Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai
Munich Nairobi Naples Osaka Oslo Ottawa Paris Prague Quito Rome Santiago Seoul Shanghai Singapore Stockholm Sydney Tehran
Tokyo Toronto Vienna Warsaw Zurich""".split()


@dataclasses.dataclass(frozen=True)
class Needle(Task):
    """`needles` sentences in each of `contexts` texts; one question a needle, all from the same filled cache.

        context    … text … [The magic number for Oslo is 48213.] … text … [The magic number for Lima is 90417.] … text …
        question   The magic number for Oslo is       (fed token by token once the cache is filled)
        target     48213

    Fields:
      length: tokens of a context (with its question, where that is known).
      depth: where the needles lie, 0 … 1; None spreads them evenly.
      known: the question is part of the prompt, so a policy may compress with it in sight.
      new_tokens: tokens that an answer may take.
      fact: how a needle reads up to its number, with {name} in it; the question is the same.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    needles: int = 10
    depth: float | None = None
    known: bool = False
    new_tokens: int = 8
    text: str = "licences"
    fact: str = "The magic number for {name} is"

    def __post_init__(self):
        if not 1 <= self.needles <= len(CITIES):
            raise ConfigError(f"needle: needles={self.needles}; allowed: 1 … {len(CITIES)}")
        if self.fact.count("{name}") != 1:
            raise ConfigError(f'needle: fact={self.fact!r}; it names {{name}} once, such as "The magic number for {{name}} is"')
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ConfigError(f"needle: depth={self.depth}; allowed: 0 … 1, or leave it out to spread them")
        if self.length < 40 * (self.needles + 1):
            least = 40 * (self.needles + 1)
            raise ConfigError(f"needle: length={self.length} cannot hold {self.needles} needles; give at least {least}")

    def count(self) -> int:
        return self.contexts

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        cities = [CITIES[i] for i in rng.choice(len(CITIES), self.needles, replace=False)]
        numbers = [str(n) for n in rng.integers(10_000, 100_000, self.needles)]
        needles = [tokenizer.encode(f" {self.fact.format(name=c)} {n}. ") for c, n in zip(cities, numbers)]
        questions = [tokenizer.encode(f"\n\n{self.fact.format(name=c)}") for c in cities]
        begin = list(tokenizer.begin)
        room = self.length - len(begin) - sum(map(len, needles)) - (max(map(len, questions)) if self.known else 0)
        hay = source.token_stream(self.text, tokenizer, rng, room)[:room]
        context, depths = source.insert(hay, needles, self.depth)
        starts = [len(begin) + round(depth * len(context)) for depth in depths]  # the exact number: a depth is start / length
        context = begin + context
        facts = [{"context": index, "needle": c, "depth": round(d, 4)} for c, d in zip(cities, depths)]
        if self.known:
            prompts, rows = [context + q for q in questions], list(range(self.needles))
            forced: list[list[int]] = [[] for _ in questions]
        else:
            prompts, rows, forced = [context], [0] * self.needles, questions
        steps = max(map(len, forced)) + self.new_tokens
        inside = [_answer(tokenizer, needle, number) for needle, number in zip(needles, numbers)]
        spans = [(start + first, start + end) for start, (first, end) in zip(starts, inside)]
        return Batch(prompts, rows, forced, steps, facts, numbers, spans)

    def score(self, batch, answers, logits, reference):
        return [
            {"answer": answer, "target": target, "correct": answer.strip().startswith(target)}
            for answer, target in zip(answers, batch.targets)
        ]

    def summary(self, rows):
        return {"accuracy": sum(r["correct"] for r in rows) / len(rows), "samples": len(rows)}


def _answer(tokenizer, needle: list[int], number: str) -> tuple[int, int]:
    """The shortest run of a needle's tokens that holds its number, (first, past the last)."""
    first, end = 0, len(needle)
    while number in tokenizer.decode(needle[first + 1 : end]):
        first += 1
    while number in tokenizer.decode(needle[first : end - 1]):
        end -= 1
    return first, end
