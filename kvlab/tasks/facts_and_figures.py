"""Whether names and numbers of what the full cache writes are there in what a policy writes."""

import dataclasses
import re

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.asked import Asked, holds
from kvlab.tasks.base import Batch, check, generator

RARE = 3  # a word that the text has at most so often


@dataclasses.dataclass(frozen=True)
class FactsAndFigures(Asked):
    """`contexts` long documents, which the model goes on writing; a policy's continuation against the full cache's own.

        context    t₁ … t_length                          (compressed by the policy)
        full       … as Lamport showed in 1978, a clock …      (`new_tokens` tokens of the full fp32 cache's continuation)
        target     Lamport, 1978: its numbers, names and rare words

    The share of them that stand in the policy's continuation counts, so the full cache has 1 by definition; an answer is
    `correct` if all do. A sample whose `facts` are 0 has nothing to lose and counts as 1. There is no question, hence none to be
    known, and what the model writes need not stand in the document, hence no spans.

    Fields:
      length, new_tokens: tokens of a document and of its continuation; a longer one has more to lose and drifts further.
      contexts: documents, decoded together.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 4
    new_tokens: int = 96
    text: str = "docstrings"

    compares_answers = True

    def __post_init__(self):
        check("facts_and_figures", contexts=(self.contexts, 1, None), length=(self.length, 1, None))
        check("facts_and_figures", new_tokens=(self.new_tokens, 1, None))

    def count(self) -> int:
        return 1

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        chosen = source.long_documents(self.text, tokenizer, generator(seed, index), self.length, self.contexts)
        prompts = [ids for _, ids in chosen]
        facts = [{"context": i, "document": name} for i, (name, _) in enumerate(chosen)]
        n = len(chosen)
        return Batch(prompts, range(n), [[]] * n, self.new_tokens, facts, [None] * n)

    def score(self, batch, made, reference=None):
        if reference is None:
            raise ConfigError(
                "facts_and_figures compares with the full cache's answers; run it by `kvlab run`, in an experiment file"
            )
        rows = []
        for answer, full in zip(made.texts, reference.texts):
            wanted = self.facts(full)
            share = sum(holds(answer, fact) for fact in wanted) / len(wanted) if wanted else 1.0
            figures = {"facts": len(wanted), "correct": share == 1, "share": share}
            rows.append({"answer": answer, "target": ", ".join(wanted), **figures})
        return rows

    def facts(self, answer: str) -> list[str]:
        """Numbers, capitalised words (of two letters and more) and words of four letters and more, these two if the text has them
        seldom in small letters or not at all; each once."""
        known = source.counts(self.text)
        found = re.findall(r"(?<!\w)(?:\d+(?:[.,]\d+)*|[A-Z][^\W\d_]+|[^\W\d_]{4,})(?!\w)", answer)
        return [word for word in dict.fromkeys(found) if word[0].isdigit() or known[word.lower()] <= RARE]
