"""The next line of a program, with a name in it that was last mentioned far back."""

import dataclasses
from difflib import SequenceMatcher

from kvlab.tasks.asked import Asked, ask, steps
from kvlab.tasks.base import Batch, check, generator
from kvlab.tasks.code import TAIL, cursor


@dataclasses.dataclass(frozen=True)
class NextLine(Asked):
    """A file of the standard library up to a line that refers to a name of its own, in each of `contexts` contexts.

        context    … def parse_header(line): … 2,000 tokens without the name … with open(path) as file:
        question   for line in file:                  (the last tokens before the line, fed one by one)
        target     key, value = parse_header(line)

    The places are those of `next_identifier`. An answer is its first line that is not empty: `correct` if it is the target,
    spaces around it aside; `similarity` is difflib's ratio of the two, 0 … 1. The line itself stands nowhere, hence no spans.

    Fields:
      length: tokens of a context (with the last ones before the line, where those are known).
      depth: where the line's name was last mentioned, 0 … 0.9, give or take 0.1; None for anywhere in the first half.
      mentions: how often the context may have it; fewer are harder.
      known: what leads up to the line is part of the prompt.
      new_tokens: tokens that an answer may take; None for half as many more as the line takes.
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
        check("next_line", contexts=(self.contexts, 1, None), length=(self.length, 4 * TAIL, None))
        check("next_line", depth=(self.depth, 0, 0.9), mentions=(self.mentions, 1, None), new_tokens=(self.new_tokens, 1, None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        found = cursor(self, tokenizer, generator(seed, index), self.depth, self.mentions, line=True)
        facts = [{"context": index, "document": found.document, "depth": round(found.depth, 4)}]
        prompts, rows, forced = ask(found.context, [found.question], self.known)
        answer = self.new_tokens or 16 + int(1.5 * len(tokenizer.encode(found.answer)))
        return Batch(prompts, rows, forced, steps(forced, answer), facts, [found.answer])

    def mark(self, answer, target):
        first = next((line.strip() for line in answer.splitlines() if line.strip()), "")
        return {"correct": first == target, "similarity": SequenceMatcher(None, first, target, autojunk=False).ratio()}

    def summary(self, rows):
        return {**super().summary(rows), "similarity": sum(row["similarity"] for row in rows) / len(rows)}
