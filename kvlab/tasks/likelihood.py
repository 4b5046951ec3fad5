"""How well a text is predicted while the cache is in use."""

import dataclasses

import numpy as np

from kvlab.evaluate import logits as statistics
from kvlab.tasks import text as source
from kvlab.tasks.base import Batch, Task, check, generator


@dataclasses.dataclass(frozen=True)
class Likelihood(Task):
    """Documents whose start fills the cache and whose continuation is fed token by token.

        prompt    t₁ … t_length          (compressed by the policy)
        forced    t_length+1 … t_length+continuation
        target    each token after the first forced one, by logits that decoding gave

    Every statistic is paired: the same tokens through the policy and through the full fp32 cache.

    Fields:
      contexts: documents, decoded together.
      length, continuation: tokens in the cache at first, and fed afterwards.
      text: see `kvlab.tasks.text`.
      until: where the continuation begins in its document, when that is not at `length`: the prompt is the `length` tokens
        before, so that tasks of different lengths predict the same tokens of the same documents.
    """

    length: int = 2048
    contexts: int = 4
    continuation: int = 96
    text: str = "docstrings"
    until: int | None = None

    compares_logits = True

    def __post_init__(self):
        check("likelihood", contexts=(self.contexts, 1, None), length=(self.length, 1, None))
        check("likelihood", continuation=(self.continuation, 2, None), until=(self.until, self.length, None))

    def count(self) -> int:
        return 1

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        end, begin = self.until or self.length, list(tokenizer.begin)
        chosen = source.long_documents(self.text, tokenizer, generator(seed, index), end + self.continuation, self.contexts)
        prompts = [begin + ids[end - self.length + len(begin) : end] for _, ids in chosen]
        forced = [ids[end:] for _, ids in chosen]
        facts = [{"context": i, "document": name} for i, (name, _) in enumerate(chosen)]
        return Batch(prompts, range(len(chosen)), forced, self.continuation, facts, forced)

    def score(self, batch, made, reference=None):
        rows = []
        for row, target in enumerate(batch.targets):
            tokens = statistics.compare(made.logits[:-1, row], reference.logits[:-1, row], target[1:])
            rows.append({k: v.tolist() for k, v in tokens.items()})
        return rows

    def summary(self, rows):
        tokens = {k: np.concatenate([r[k] for r in rows]) for k in ("kl", "same_top1", "nll", "nll_reference")}
        return {**statistics.summarise(tokens), "tokens": len(tokens["kl"]), "samples": len(rows)}
