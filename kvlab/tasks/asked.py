"""What tasks share that put something into a context and ask for it: placing, asking, finding and marking."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.base import Task


class Asked(Task):
    """Questions that are answered in words, in `contexts` batches.

    A target is a text that the answer must begin with, or a tuple of texts that must stand in it and count alike.
    """

    length: Any
    contexts: Any
    known: Any = False

    def count(self) -> int:
        return self.contexts

    def hay(self, tokenizer, rng, length: int) -> list[int]:
        """At least `length` tokens to hide things in."""
        return source.token_stream(self.text, tokenizer, rng, length)  # type: ignore[attr-defined]

    def mark(self, answer: str, target) -> dict[str, Any]:
        """`correct`, and besides it the `share` of the target where an answer can be right in part."""
        if isinstance(target, str):
            return {"correct": answer.strip().startswith(target)}
        share = sum(holds(answer, word) for word in target) / len(target)
        return {"correct": share == 1, "share": share}

    def written(self, target) -> str:
        return target if isinstance(target, str) else ", ".join(target)

    def score(self, batch, made, reference=None):
        return [
            {"answer": answer, "target": self.written(target), **self.mark(answer, target)}
            for answer, target in zip(made.texts, batch.targets)
        ]

    def summary(self, rows):
        return {"accuracy": sum(row.get("share", row["correct"]) for row in rows) / len(rows), "samples": len(rows)}


def holds(answer: str, word: str) -> bool:
    """Whether a word or number stands in the answer, whole."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer) is not None


def room(task: Asked, tokenizer, questions: Sequence[list[int]], taken: int = 0) -> int:
    """Tokens of the task's length that are left besides BOS, `taken` ones and, where it is known, the longest question.

    Errors: ConfigError where none is left.
    """
    asked = max(map(len, questions)) if task.known else 0
    left = task.length - len(tokenizer.begin) - asked - taken
    if left < 1:
        raise ConfigError(
            f"length={task.length} has no room for {taken + asked} tokens of what is hidden and asked, and for a text; "
            f"give at least {2 * (taken + asked)}, or hide less"
        )
    return left


def hide(
    task: Asked, tokenizer, rng, pieces: list[list[int]], questions: Sequence[list[int]], depth: float | None = None
) -> tuple[list[int], list[int]]:
    """A context with the pieces in it, spread or all at `depth`, and the token at which each begins. Errors: ConfigError."""
    begin = list(tokenizer.begin)
    left = room(task, tokenizer, questions, sum(map(len, pieces)))
    context, starts = source.insert(task.hay(tokenizer, rng, left)[:left], pieces, depth)
    return begin + context, [len(begin) + start for start in starts]


def ask(
    context: list[int], questions: Sequence[list[int]], known: bool
) -> tuple[list[list[int]], list[int], Sequence[list[int]]]:
    """A batch's prompts, rows and forced tokens: all questions from one filled cache or, if known, each in its own prompt."""
    if known:
        return [context + question for question in questions], list(range(len(questions))), [[] for _ in questions]
    return [context], [0] * len(questions), questions


def steps(forced: Sequence[list[int]], answer: int) -> int:
    """Steps that feed the forced tokens and leave room for `answer` tokens."""
    return max(map(len, forced)) + answer


def find(tokenizer, ids: list[int], text: str, start: int = 0) -> tuple[int, int]:
    """The shortest run of tokens that holds the last place where a text stands, (first, past the last), counted from `start`."""
    first = bisect_left(range(len(ids)), True, key=lambda i: text not in tokenizer.decode(ids[i + 1 :]))
    end = first + bisect_left(range(len(ids) - first), True, key=lambda n: text in tokenizer.decode(ids[first : first + n]))
    return start + first, start + end
