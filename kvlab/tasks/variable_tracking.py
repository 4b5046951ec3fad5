"""Chains of references hidden in a long text: an answer needs several places, found one after another."""

import dataclasses

from kvlab.tasks.asked import Asked, ask, find, hide, steps
from kvlab.tasks.base import Batch, check, generator
from kvlab.tasks.needle import CITIES

STATEMENT = " The magic number for {} is {}. "
EXAMPLES = {  # of chains, by the number at their end; none of the names is among CITIES
    "55120": ("Bern", "Riga", "Lyon", "Kyiv"),
    "31007": ("Pisa", "Porto", "Oxford", "Bilbao"),
    "84462": ("Tallinn", "Dresden", "Nantes", "Krakow"),
}
MOST = 3  # hops


@dataclasses.dataclass(frozen=True)
class VariableTracking(Asked):
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
      depth: where the statements lie, one after another, 0 … 1; None spreads them evenly. A sample's depth is its number's.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take; None for as many as the chain written out needs.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    chains: int = 4
    hops: int = 1
    depth: float | None = None
    known: bool = False
    new_tokens: int | None = None
    text: str = "licences"

    def __post_init__(self):
        check("variable_tracking", hops=(self.hops, 0, MOST), contexts=(self.contexts, 1, None), depth=(self.depth, 0, 1))
        check("variable_tracking", chains=(self.chains, 1, len(CITIES) // (self.hops + 1)))
        check("variable_tracking", length=(self.length, 20 * (self.chains * (self.hops + 1) + 1), None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        names = rng.choice(CITIES, (self.chains, self.hops + 1), replace=False).tolist()
        numbers = [str(n) for n in rng.integers(10_000, 100_000, self.chains)]
        # of all chains the number first, then the reference to it, and so on
        stated = [(int(chain), hop) for hop in range(self.hops + 1) for chain in rng.permutation(self.chains)]
        says = lambda chain, hop: names[chain][hop - 1] if hop else numbers[chain]
        pieces = [tokenizer.encode(STATEMENT.format(names[chain][hop], says(chain, hop))) for chain, hop in stated]
        questions = [tokenizer.encode(f"\n\n{self.examples()}\nThe magic number for {chain[-1]} is") for chain in names]
        context, starts = hide(self, tokenizer, rng, pieces, questions, self.depth)
        first = [stated.index((chain, 0)) for chain in range(self.chains)]
        facts = [
            {"context": index, "chain": " <- ".join(chain), "depth": round(starts[i] / len(context), 4)}
            for chain, i in zip(names, first)
        ]
        spans = [find(tokenizer, pieces[i], number, starts[i]) for i, number in zip(first, numbers)]
        prompts, rows, forced = ask(context, questions, self.known)
        answer = self.new_tokens or 8 + 12 * self.hops
        return Batch(prompts, rows, forced, steps(forced, answer), facts, numbers, spans)

    def examples(self) -> str:
        """Chains of other names, each written out from its end on a line of its own."""
        chains = [[*names[: self.hops + 1], number] for number, names in EXAMPLES.items()]
        return "\n".join(" ".join(map(STATEMENT.strip().format, nodes, nodes[1:])) for nodes in chains)

    def mark(self, answer, target):
        return {"correct": first_number(answer) == target}


def first_number(text: str) -> str:
    """The first run of digits, "" where there is none."""
    start = next((i for i, c in enumerate(text) if c.isdigit()), len(text))
    end = next((i for i in range(start, len(text)) if not text[i].isdigit()), len(text))
    return text[start:end]
