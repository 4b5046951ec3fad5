"""The next name in a program, which was last mentioned far back."""

import dataclasses
import re

from kvlab.tasks.code import Code


@dataclasses.dataclass(frozen=True)
class NextIdentifier(Code):
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

    name = "next_identifier"

    def room(self, tokenizer, answer):
        return 4 + len(tokenizer.encode(f" {answer}"))

    def mark(self, answer, target):
        first = re.match(r"\w+", answer.strip())
        return {"correct": first is not None and first[0] == target}
