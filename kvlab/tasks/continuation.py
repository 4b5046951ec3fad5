"""What a policy makes of many drawn continuations: distributions are compared, not one text."""

import dataclasses

import numpy as np

from kvlab.errors import ConfigError
from kvlab.evaluate import logits as statistics
from kvlab.sampling import Sampling
from kvlab.tasks import text as source
from kvlab.tasks.base import Batch, Task, check, generator

GRAM = 4  # tokens: a run of so many that was there before counts as repeated


@dataclasses.dataclass(frozen=True)
class Continuation(Task):
    """`samples` continuations of each of `contexts` documents, drawn with the same seeds by the policy and by the full cache.

        context    t₁ … t_length                 (compressed by the policy)
        full       a b c d e f g …               (drawn from the full fp32 cache; as many tokens as `new_tokens`)
        policy     a b c d x y …                 (the same random numbers: it leaves where its distribution lets it)

    As far as both have the same tokens, their next-token distributions are compared step by step: `kl` (nats) and `same_top1`.
    `agreed` is how long that is, as a share of the full cache's continuation. Length and repetition (the share of runs of 4
    tokens that were there before) are those of the whole texts. Source of the shared numbers: Gumbel noise by seed and position
    (`kvlab.sampling`).

    Fields:
      length, new_tokens: tokens of a document and of a continuation.
      contexts, samples: documents, and continuations of each, all decoded together.
      temperature: 0 is greedy, of which more than one sample says nothing more.
      text: see `kvlab.tasks.text`.
    """

    length: int = 2048
    contexts: int = 2
    samples: int = 4
    new_tokens: int = 64
    temperature: float = 1.0
    text: str = "docstrings"

    compares_logits = True

    def __post_init__(self):
        check("continuation", contexts=(self.contexts, 1, None), samples=(self.samples, 1, None))
        check("continuation", length=(self.length, 1, None), new_tokens=(self.new_tokens, GRAM, None))
        check("continuation", temperature=(self.temperature, 0, None))

    def count(self) -> int:
        return 1

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        chosen = source.long_documents(self.text, tokenizer, generator(seed, index), self.length, self.contexts)
        pairs = [(c, s) for c in range(len(chosen)) for s in range(self.samples)]
        facts = [{"context": c, "document": chosen[c][0], "draw": s} for c, s in pairs]
        seeds = generator(seed, index).integers(2**31, size=len(pairs)).tolist()
        how, n = Sampling(temperature=self.temperature), len(pairs)
        prompts = [ids for _, ids in chosen]
        return Batch(prompts, [c for c, _ in pairs], [[]] * n, self.new_tokens, facts, [None] * n, (), how, seeds)

    def score(self, batch, made, reference=None):
        if reference is None:
            raise ConfigError("continuation compares with the full cache's; run it by `kvlab run`, in an experiment file")
        rows = []
        for row, (mine, theirs) in enumerate(zip(made.tokens, reference.tokens)):
            same = agreed(mine, theirs)
            steps = min(same, len(made.logits), len(reference.logits))
            fed = statistics.compare(made.logits[:steps, row], reference.logits[:steps, row], np.asarray(mine[:steps], int))
            rows.append({
                "answer": made.texts[row], "target": reference.texts[row],
                "step_kl": fed["kl"].tolist(), "step_top1": fed["same_top1"].tolist(),
                "agreed": same / max(len(theirs), 1), "tokens": len(mine), "tokens_reference": len(theirs),
                "repetition": repetition(mine), "repetition_reference": repetition(theirs),
            })  # fmt: skip
        return rows

    def summary(self, rows):
        mean = lambda name: float(np.mean([row[name] for row in rows]))
        steps = {name: np.concatenate([row[name] for row in rows]) for name in ("step_kl", "step_top1")}
        return {
            "step_kl": float(steps["step_kl"].mean()),
            "step_top1": float(steps["step_top1"].mean()),
            **{name: mean(name) for name in ("agreed", "tokens", "repetition")},
            "samples": len(rows),
        }


def agreed(mine: list[int], theirs: list[int]) -> int:
    """Tokens until the two part."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def repetition(tokens: list[int]) -> float:
    """Share of the runs of `GRAM` tokens that were there before; 0 for a text too short to have two."""
    runs = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
