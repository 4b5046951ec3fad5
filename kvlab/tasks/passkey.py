"""A pass key among sentences that say nothing."""

import dataclasses

from kvlab.tasks.asked import Asked, ask, find, hide, steps
from kvlab.tasks.base import Batch, check, generator

NOISE = " The river runs low. The fields are wide. The wind is mild. A cart goes by, and a cart comes back."
KEY = " The pass key is {}. Remember it. "
QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclasses.dataclass(frozen=True)
class Passkey(Asked):
    """One number in each of `contexts` texts that say the same few sentences over and over.

        context    The river runs low. The fields … [The pass key is 48213. Remember it.] The river runs low. The fields …
        question   What is the pass key? The pass key is       (fed token by token once the cache is filled)
        target     48213

    After https://arxiv.org/abs/2305.16300. The easiest place to find: everything around the key repeats, so a policy that
    scores tokens by how they differ from others has it for nothing.

    Fields:
      length: tokens of a context (with its question, where that is known).
      depth: where the key stands, 0 … 1; None draws it for each context.
      digits: of the key.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take; None for as many as the key may take.
    """

    length: int = 2048
    contexts: int = 8
    depth: float | None = None
    digits: int = 5
    known: bool = False
    new_tokens: int | None = None

    def __post_init__(self):
        check("passkey", contexts=(self.contexts, 1, None), depth=(self.depth, 0, 1), digits=(self.digits, 1, 64))
        check("passkey", length=(self.length, 64 + 2 * self.digits, None), new_tokens=(self.new_tokens, 1, None))

    def hay(self, tokenizer, rng, length):
        once = tokenizer.encode(NOISE)
        return once * (length // len(once) + 1)

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        key = "".join(map(str, [rng.integers(1, 10), *rng.integers(0, 10, self.digits - 1)]))
        depth = rng.random() if self.depth is None else self.depth
        piece, question = tokenizer.encode(KEY.format(key)), [tokenizer.encode(QUESTION)]
        context, (start,) = hide(self, tokenizer, rng, [piece], question, depth)
        facts = [{"context": index, "depth": round(start / len(context), 4)}]
        prompts, rows, forced = ask(context, question, self.known)
        answer = self.new_tokens or self.digits + 3
        return Batch(prompts, rows, forced, steps(forced, answer), facts, [key], [find(tokenizer, piece, key, start)])
