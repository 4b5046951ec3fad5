"""Chains of references hidden in a long text: an answer needs several places, found one after another."""

import dataclasses

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.base import Batch, Task, generator
from kvlab.tasks.needle import CITIES

STATEMENT = " The magic number for {} is {}. "
EXAMPLES = {  # of chains, by the number at their end; none of the names is among CITIES
    "55120": ("Bern", "Riga", "Lyon", "Kyiv"),
    "31007": ("Pisa", "Porto", "Oxford", "Bilbao"),
    "84462": ("Tallinn", "Dresden", "Nantes", "Krakow"),
}
MOST = 3  # hops


@dataclasses.dataclass(frozen=True)
class VariableTracking(Task):
    """`chains` chains of `hops` references in each of `contexts` texts; each is followed from its end, from one filled cache.

        context    … [The magic number for Lima is 48213.] … text … [The magic number for Oslo is Lima.] …
        question   The magic number for Bern is Riga. The magic number for Riga is 55120.
                   …                                  (three examples of other names, then the question; all of it is fed
                   The magic number for Oslo is        token by token once the cache is filled)
        target     48213                              (the first number in the answer, which may name Lima before it)

    After the variable tracking of RULER (https://arxiv.org/abs/2404.06654, section 3.2), with the words of `needle`. It takes a
    model that can do it: with the full cache SmolLM2-135M followed 0 of 16 chains of one hop in 500 tokens. A statement comes
    after what it refers to, and chains lie among one another. A model that names any number of the context is right once in
    `chains` times.

    Fields:
      length: tokens of a context.
      chains, hops: chains in a context, and references in each besides the number itself.
      new_tokens: tokens that an answer may take; None for as many as the chain written out needs.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    chains: int = 4
    hops: int = 1
    new_tokens: int | None = None
    text: str = "licences"

    def __post_init__(self):
        if not 0 <= self.hops <= MOST:
            raise ConfigError(f"variable_tracking: hops={self.hops}; allowed: 0 … {MOST}")
        most = len(CITIES) // (self.hops + 1)
        if not 1 <= self.chains <= most:
            raise ConfigError(
                f"variable_tracking: chains={self.chains}; allowed: 1 … {most} (of {self.hops + 1} of {len(CITIES)} cities each)"
            )
        least = 20 * (self.chains * (self.hops + 1) + 1)
        if self.length < least or self.contexts < 1:
            raise ConfigError(
                f"variable_tracking: length={self.length}, contexts={self.contexts}; {self.chains} chains of {self.hops} hops "
                f"need length of at least {least}, and contexts is 1 or more"
            )

    def count(self) -> int:
        return self.contexts

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        names = rng.choice(CITIES, (self.chains, self.hops + 1), replace=False).tolist()
        numbers = [str(n) for n in rng.integers(10_000, 100_000, self.chains)]
        pieces = []
        for hop in range(self.hops + 1):  # of all chains the number first, then the reference to it, and so on
            for chain in rng.permutation(self.chains):
                value = names[chain][hop - 1] if hop else numbers[chain]
                pieces.append(tokenizer.encode(STATEMENT.format(names[chain][hop], value)))
        begin = list(tokenizer.begin)
        room = self.length - len(begin) - sum(map(len, pieces))
        context, _ = source.insert(source.token_stream(self.text, tokenizer, rng, room)[:room], pieces)
        questions = [tokenizer.encode(f"\n\n{self.examples()}\nThe magic number for {chain[-1]} is") for chain in names]
        facts = [{"context": index, "chain": " <- ".join(chain)} for chain in names]
        steps = max(map(len, questions)) + (self.new_tokens or 8 + 12 * self.hops)
        return Batch([begin + context], [0] * self.chains, questions, steps, facts, numbers)

    def examples(self) -> str:
        """Chains of other names, each written out from its end on a line of its own."""
        chains = [[*names[: self.hops + 1], number] for number, names in EXAMPLES.items()]
        return "\n".join(" ".join(map(STATEMENT.strip().format, nodes, nodes[1:])) for nodes in chains)

    def score(self, batch, answers, logits, reference):
        return [
            {"answer": answer, "target": target, "correct": first_number(answer) == target}
            for answer, target in zip(answers, batch.targets)
        ]

    def summary(self, rows):
        return {"accuracy": sum(r["correct"] for r in rows) / len(rows), "samples": len(rows)}


def first_number(text: str) -> str:
    """The first run of digits, "" where there is none."""
    start = next((i for i, c in enumerate(text) if c.isdigit()), len(text))
    end = next((i for i in range(start, len(text)) if not text[i].isdigit()), len(text))
    return text[start:end]
