"""The next line of a program, with a name in it that was last mentioned far back."""

import dataclasses
from difflib import SequenceMatcher

from kvlab.tasks.code import Code


@dataclasses.dataclass(frozen=True)
class NextLine(Code):
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

    name = "next_line"
    line = True

    def room(self, tokenizer, answer):
        return 16 + int(1.5 * len(tokenizer.encode(answer)))

    def mark(self, answer, target):
        first = next((line.strip() for line in answer.splitlines() if line.strip()), "")
        return {"correct": first == target, "similarity": SequenceMatcher(None, first, target, autojunk=False).ratio()}

    def summary(self, rows):
        return {**super().summary(rows), "similarity": sum(row["similarity"] for row in rows) / len(rows)}
