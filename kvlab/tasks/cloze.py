"""Gaps in a real text, made by rule: a word that stands in it once is asked for by the words before it."""

import dataclasses
import re
from collections import Counter

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.asked import Asked, ask, find, hide, steps
from kvlab.tasks.base import Batch, check, generator

TRIES = 30
Gap = tuple[int, int, int]  # characters at which the cue and the word begin, and at which the word ends


@dataclasses.dataclass(frozen=True)
class Cloze(Asked):
    """`gaps` words of each of `contexts` texts, asked for one by one from the same filled cache.

        context    … of the licence. Redistributions of the source must retain the notice above, and this list … text …
        question   Redistributions of the source must retain the       (fed token by token once the cache is filled)
        target     notice

    A rule makes the questions, no model: the words and numbers that stand once in the context, by the `cue` words before them
    (which stand there once as well); of those in the same part of the text, the one that the whole of `text` has least often.

    Fields:
      length: tokens of a context (with its question, where that is known).
      gaps: questions about a context.
      cue: words that a question gives; fewer are harder.
      depth: the gaps are the nearest to here, 0 … 1; None spreads them over equal parts of the text.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    gaps: int = 8
    cue: int = 6
    depth: float | None = None
    known: bool = False
    new_tokens: int = 8
    text: str = "licences"

    def __post_init__(self):
        check("cloze", contexts=(self.contexts, 1, None), gaps=(self.gaps, 1, None), cue=(self.cue, 1, 20))
        check("cloze", depth=(self.depth, 0, 1), new_tokens=(self.new_tokens, 1, None))
        check("cloze", length=(self.length, max(160, 20 * self.gaps), None))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        rng = generator(seed, index)
        context, text, found = self._text(tokenizer, rng)
        asked = self.chosen(text, found)
        questions = [question(tokenizer, text, gap) for gap in asked]
        targets = [text[b:c] for _, b, c in asked]
        spans = []
        for (a, _, c), target in zip(asked, targets):
            first, end = find(tokenizer, context, text[a:c])
            spans.append(find(tokenizer, context[first:end], target, first))
        facts = [{"context": index, "depth": round(first / len(context), 4)} for first, _ in spans]
        prompts, rows, forced = ask(context, questions, self.known)
        return Batch(prompts, rows, forced, steps(forced, self.new_tokens), facts, targets, spans)

    def _text(self, tokenizer, rng) -> tuple[list[int], str, list[Gap]]:
        """A context, its text and the gaps that could be in it. Licences hold lists and names too, so texts are drawn until one
        has enough. Errors: ConfigError."""
        longest = tokenizer.encode("\n\n" + " cue" * 3 * self.cue)  # cues that take more are left out
        for _ in range(TRIES):
            context, _ = hide(self, tokenizer, rng, [], [longest])
            text = tokenizer.decode(context)
            found = [gap for gap in candidates(text, self.cue) if len(question(tokenizer, text, gap)) <= len(longest)]
            if len(found) >= self.gaps:
                return context, text, found
        raise ConfigError(f"cloze: {len(found)} words can be asked for in length={self.length}; lower gaps={self.gaps}")

    def chosen(self, text: str, found: list[Gap]) -> list[Gap]:
        """Those of the gaps that are asked for."""
        if self.depth is not None:
            place = self.depth * len(text)
            return sorted(sorted(found, key=lambda gap: abs(gap[1] - place))[: self.gaps])
        known = source.counts(self.text)
        rare = lambda gap: (known[text[gap[1] : gap[2]].lower()], gap)
        cuts = [i * len(found) // self.gaps for i in range(self.gaps + 1)]
        return [min(found[a:b], key=rare) for a, b in zip(cuts, cuts[1:])]


def question(tokenizer, text: str, gap: Gap) -> list[int]:
    """The question for a gap."""
    return tokenizer.encode(f"\n\n{text[gap[0] : gap[1]].rstrip()}")


def candidates(text: str, cue: int) -> list[Gap]:
    """Words of five letters and more and numbers of two digits and more that stand once in a text, behind `cue` words that
    do so too, with single spaces or line breaks between them."""
    words = list(re.finditer(r"[^\W_]+", text))
    often = Counter(word[0].lower() for word in words)
    found = []
    for before, word in zip(words, words[cue:]):
        a, (b, c) = before.start(), word.span()
        alone = re.fullmatch(r"[A-Za-z]{5,}|[0-9]{2,}", word[0]) and often[word[0].lower()] == 1
        plain = text[b - 1] == " " and not re.search(r"\s\s", text[a:b])
        if alone and plain and text.count(text[a:b]) == 1:
            found.append((a, b, c))
    return found
