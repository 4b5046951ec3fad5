"""The next name in a program, which was last mentioned far back."""

import dataclasses
import re

from kvlab.tasks.asked import Asked, ask, steps
from kvlab.tasks.base import Batch, check, generator
from kvlab.tasks.code import TAIL, cursor


@dataclasses.dataclass(frozen=True)
class NextIdentifier(Asked):
    """A file of the standard library up to a reference to a name of its own, in each of `contexts` contexts.

        context    … def parse_header(line): … 2,000 tokens without the name … for line in lines:
        question   key, value =                       (the last tokens before the name, fed one by one)
        target     parse_header

    The syntax tree says which names a file defines, its tokens where they are referred to; of these places one is drawn.

    Fields:
      length: tokens of a context (with the last ones before the name, where those are known).
      depth: where the name was last mentioned, 0 … 0.9, give or take 0.1; None for anywhere in the first half.
      mentions: how often the context may have it; fewer are harder.
      known: what leads up to the name is part of the prompt.
      new_tokens: tokens that an answer may take; None for a few more than the name takes.
      text: "stdlib", or Python files as `kvlab.tasks.text` takes them.
    """

    length: int = 2048
    contexts: int = 8
    depth: float | None = None
    mentions: int = 3
    known: bool = False
    new_tokens: int | None = None
    text: str = "stdlib"

    def __post_init__(self):
        check("next_identifier", contexts=(self.contexts, 1, None), length=(self.length, 4 * TAIL, None))
        check(
            "next_identifier",
            depth=(self.depth, 0, 0.9),
            mentions=(self.mentions, 1, None),
            new_tokens=(self.new_tokens, 1, None),
        )

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        found = cursor(self, tokenizer, generator(seed, index), self.depth, self.mentions, line=False)
        facts = [{"context": index, "document": found.document, "depth": round(found.depth, 4)}]
        prompts, rows, forced = ask(found.context, [found.question], self.known)
        answer = self.new_tokens or 4 + len(tokenizer.encode(f" {found.answer}"))
        return Batch(prompts, rows, forced, steps(forced, answer), facts, [found.answer], [found.span])

    def mark(self, answer, target):
        first = re.match(r"\w+", answer.strip())
        return {"correct": first is not None and first[0] == target}
