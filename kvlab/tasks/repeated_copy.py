"""Something of a context to be written again."""

import dataclasses
import re
from difflib import SequenceMatcher
from typing import Literal

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.asked import Asked, ask, find, hide, steps
from kvlab.tasks.base import Batch, check, generator

PIECE = " Copy this: {}. "
ONCE, TIMES = "\n\nCopy this:", "\n\nCopy this {} times:"
CUE = 5  # words of a paragraph that are given


@dataclasses.dataclass(frozen=True)
class RepeatedCopy(Asked):
    """Words that stand in each of `contexts` texts, to be copied `times` times; or a stretch of the text itself, once.

        context    … text … [Copy this: kite moon salt bread.] … text …
        question   Copy this 2 times:               (fed token by token once the cache is filled)
        target     kite moon salt bread kite moon salt bread

        context    … text … the software is provided as is without warranty of any kind … text …      (what = "text")
        question   the software is provided as
        target     is without warranty of any kind

    An answer is `correct` if it begins with the target's words; the share of these that `difflib` finds in it, in order, counts.

    Fields:
      length: tokens of a context (with its question, where that is known).
      depth: where it stands, 0 … 1; None draws it for each context.
      words, times: how many are to be copied, and how often.
      what: "words" that are drawn, or a stretch of the "text".
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take; None for what the target takes and half as many.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 8
    depth: float | None = None
    words: int = 8
    times: int = 1
    what: Literal["words", "text"] = "words"
    known: bool = False
    new_tokens: int | None = None
    text: str = "licences"

    def __post_init__(self):
        check("repeated_copy", contexts=(self.contexts, 1, None), depth=(self.depth, 0, 1), words=(self.words, 1, 500))
        check("repeated_copy", times=(self.times, 1, 100 if self.what == "words" else 1), new_tokens=(self.new_tokens, 1, None))
        check("repeated_copy", length=(self.length, 64 + 4 * self.words, None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        depth = rng.random() if self.depth is None else self.depth
        make = self._drawn if self.what == "words" else self._stretch
        context, question, copied, span = make(tokenizer, rng, depth)
        target = " ".join([copied] * self.times)
        facts = [{"context": index, "depth": round(span[0] / len(context), 4)}]
        prompts, rows, forced = ask(context, [question], self.known)
        answer = self.new_tokens or 4 + int(1.5 * len(tokenizer.encode(f" {target}")))
        return Batch(prompts, rows, forced, steps(forced, answer), facts, [target], [span])

    def _drawn(self, tokenizer, rng, depth: float):
        """Context, question, what is to be copied and where it stands, for words that are hidden."""
        usable = source.vocabulary(self.text)
        copied = " ".join(usable[i] for i in rng.choice(len(usable), self.words, replace=False))
        piece = tokenizer.encode(PIECE.format(copied))
        question = tokenizer.encode(ONCE if self.times == 1 else TIMES.format(self.times))
        context, (start,) = hide(self, tokenizer, rng, [piece], [question], depth)
        return context, question, copied, find(tokenizer, piece, copied, start)

    def _stretch(self, tokenizer, rng, depth: float):
        """The same for words of the text whose first ones stand there once. Errors: ConfigError."""
        longest = tokenizer.encode("\n\n" + " cue" * 3 * CUE)  # cues that take more are left out
        context, _ = hide(self, tokenizer, rng, [], [longest])
        text = tokenizer.decode(context)
        places = [m.start() for m in re.finditer(r"(?<!\S)\S", text)]
        last = len(places) - CUE - self.words - 1
        order = sorted(range(1, last), key=lambda i: abs(i - depth * last))
        for i in order:
            a, b, c = places[i], places[i + CUE], places[i + CUE + self.words]
            cue, copied = text[a:b].strip(), text[b:c].strip()
            question = tokenizer.encode(f"\n\n{cue}")
            if text.count(cue) == 1 and "\n\n" not in text[a:c] and len(question) <= len(longest):
                first, end = find(tokenizer, context, text[a:c].strip())
                return context, question, copied, find(tokenizer, context[first:end], copied, first)
        raise ConfigError(
            f"repeated_copy: text={self.text!r} has no {CUE + self.words} words in a row whose first stand there once"
        )

    def mark(self, answer, target):
        made, want = (re.findall(r"\w+", text) for text in (answer, target))
        matched = sum(block.size for block in SequenceMatcher(None, want, made, autojunk=False).get_matching_blocks())
        return {"correct": made[: len(want)] == want, "share": matched / len(want)}
