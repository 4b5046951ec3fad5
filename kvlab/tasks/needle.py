"""Facts hidden in a long text, asked for one by one or several at once."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks.asked import Asked, ask, find, hide, steps
from kvlab.tasks.base import Batch, check, generator

CITIES = """Amsterdam Ankara Athens Baghdad Bangkok Barcelona Beijing Belgrade Berlin Bogota Boston Brussels Budapest
Cairo Chicago Copenhagen Dakar Damascus Delhi Dublin Edinburgh Florence Geneva Hamburg Hanoi Havana Helsinki Istanbul
Jakarta Jerusalem Kabul Karachi Kyoto Lagos Lima Lisbon London Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai
Munich Nairobi Naples Osaka Oslo Ottawa Paris Prague Quito Rome Santiago Seoul Shanghai Singapore Stockholm Sydney Tehran
Tokyo Toronto Vienna Warsaw Zurich""".split()
FACT = "The magic number for {name} is"
SEVERAL = "The magic numbers for {name} are"


@dataclasses.dataclass(frozen=True)
class Needle(Asked):
    """`needles` names in each of `contexts` texts, each with its number; all questions are asked from the same filled cache.

        context    … text … [The magic number for Oslo is 48213.] … text … [The magic number for Lima is 90417.] … text …
        question   The magic number for Oslo is       (fed token by token once the cache is filled)
        target     48213

    With the variants of RULER (https://arxiv.org/abs/2404.06654, section 3.1): `distractors` makes multi-key of it, `values`
    multi-value, `asked` multi-query. Where a question wants several numbers, the share of them in the answer counts; it is
    `correct` if all are there, and its depth is the first number's.

    Fields:
      length: tokens of a context (with its question, where that is known).
      depth: where the needles lie, 0 … 1; None spreads them evenly.
      distractors: further names with numbers that are never asked for.
      values: numbers for each name, in sentences that lie apart.
      asked: names in one question; divides `needles`.
      known: the question is part of the prompt, so a policy may compress with it in sight.
      new_tokens: tokens that an answer may take for each number wanted.
      fact: how a needle reads up to its number, with {name} in it; the question is the same.
      question: how a question for several numbers reads.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    needles: int = 10
    depth: float | None = None
    distractors: int = 0
    values: int = 1
    asked: int = 1
    known: bool = False
    new_tokens: int = 8
    text: str = "licences"
    fact: str = FACT
    question: str = SEVERAL

    def __post_init__(self):
        check("needle", contexts=(self.contexts, 1, None), needles=(self.needles, 1, len(CITIES)), values=(self.values, 1, None))
        check("needle", distractors=(self.distractors, 0, len(CITIES) - self.needles), depth=(self.depth, 0, 1))
        check("needle", new_tokens=(self.new_tokens, 1, None))
        for field, given, example in (("fact", self.fact, FACT), ("question", self.question, SEVERAL)):
            if given.count("{name}") != 1:
                raise ConfigError(f'needle: {field}={given!r}; it names {{name}} once, such as "{example}"')
        if self.asked < 1 or self.needles % self.asked:
            fitting = [n for n in range(1, self.needles + 1) if self.needles % n == 0]
            raise ConfigError(f"needle: asked={self.asked}; allowed: {fitting}, what divides needles={self.needles}")
        sentences = (self.needles + self.distractors) * self.values
        if self.length < 40 * (sentences + 1):
            least = 40 * (sentences + 1)
            raise ConfigError(f"needle: length={self.length} cannot hold {sentences} needles; give at least {least}")

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        cities = [CITIES[i] for i in rng.choice(len(CITIES), self.needles + self.distractors, replace=False)]
        numbers = [str(n) for n in rng.integers(10_000, 100_000, len(cities) * self.values)]
        order = list(range(len(numbers)))  # sentence i is about city i // values
        if len(order) > self.needles:
            order = rng.permutation(order).tolist()
        pieces = {i: tokenizer.encode(f" {self.fact.format(name=cities[i // self.values])} {numbers[i]}. ") for i in order}
        groups = [range(i, i + self.asked) for i in range(0, self.needles, self.asked)]
        questions = [tokenizer.encode(f"\n\n{self.asking([cities[c] for c in group])}") for group in groups]
        context, starts = hide(self, tokenizer, rng, list(pieces.values()), questions, self.depth)
        spans = {i: find(tokenizer, piece, numbers[i], start) for (i, piece), start in zip(pieces.items(), starts)}
        wanted = [range(group[0] * self.values, (group[-1] + 1) * self.values) for group in groups]
        depth = lambda group: round(min(starts[order.index(i)] for i in group) / len(context), 4)
        facts = [
            {"context": index, "needle": ", ".join(cities[c] for c in group), "depth": depth(want)}
            for group, want in zip(groups, wanted)
        ]
        targets = [numbers[want[0]] if len(want) == 1 else tuple(numbers[i] for i in want) for want in wanted]
        prompts, rows, forced = ask(context, questions, self.known)
        where = [tuple(x for i in sorted(want, key=spans.get) for x in spans[i]) for want in wanted]  # type: ignore[arg-type]
        return Batch(prompts, rows, forced, steps(forced, self.new_tokens * len(wanted[0])), facts, targets, where)

    def asking(self, names: list[str]) -> str:
        """A question about these names."""
        form = self.fact if len(names) * self.values == 1 else self.question
        return form.format(name=names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}")
