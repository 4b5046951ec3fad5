"""What a task hands to the runner, and what it makes of what comes back."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvlab.errors import ConfigError
from kvlab.sampling import Sampling
from kvlab.tasks import text as source


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples that are decoded together.

    Attributes:
      prompts: token ids to prefill; each is compressed once and serves every sample that continues it.
      rows: the prompt that each sample continues.
      forced: tokens that each sample is fed one by one once the cache is filled.
      new_tokens: steps to take; covers the forced tokens and the answer.
      facts: what is known about each sample and goes into its row of the results.
      targets: what the task wants back, in its own form.
      sampling: how tokens are drawn; greedily without. seeds: of each sample's draws, the same whatever the policy.
      spans: where each sample's answer stands in its prompt, (first, past the last) token, and on like that for an answer
        that stands in several places; empty where no place holds it.
    """

    prompts: Sequence[list[int]]
    rows: Sequence[int]
    forced: Sequence[list[int]]
    new_tokens: int
    facts: Sequence[dict[str, Any]]
    targets: Sequence[Any]
    spans: Sequence[tuple[int, ...]] = ()
    sampling: Sampling | None = None
    seeds: Sequence[int] = ()


class Answers(NamedTuple):
    """What came of a batch under a policy: each sample's answer, its token ids, and the logits of every step `[steps, B, V]`,
    which are there where the task compares them."""

    texts: Sequence[str]
    tokens: Sequence[list[int]] = ()
    logits: Any = None


class Task:
    """Pure function of its fields, a seed and the text: the same three give the same samples.

    Attributes:
      compares_logits: samples are scored against the full fp32 cache's, by logits too.
      compares_answers: samples are scored against the answers that the full fp32 cache gives.
    """

    compares_logits: bool = False
    compares_answers: bool = False

    def count(self) -> int:
        """Number of batches."""
        raise NotImplementedError

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        """The samples of one batch; each prompt starts with `tokenizer.begin` (BOS, where the model wants one)."""
        raise NotImplementedError

    def score(self, batch: Batch, made: Answers, reference: Answers | None = None) -> list[dict[str, Any]]:
        """Scalars, or lists of them, for each sample. `reference` is the full cache's, where the task compares with it."""
        raise NotImplementedError

    def summary(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Scalars over all samples of a cell."""
        raise NotImplementedError

    def written(self, target) -> str:
        """A target as a right answer would write it. Errors: ConfigError for tasks that no one text answers."""
        raise ConfigError(f"{type(self).__name__} has no answers in words; take a task that asks questions, such as needle")

    def digest(self) -> str:
        """SHA-256 of the text that samples are made of, "" where there is none."""
        return source.digest(self.text) if hasattr(self, "text") else ""


def generator(seed: int, index: int) -> np.random.Generator:
    """One generator per (seed, batch), so that batches can be made alone and in any order."""
    return np.random.default_rng([seed, index])


def check(task: str, **fields: tuple[float | None, float, float | None]) -> None:
    """Refuses fields out of their bounds, each given as (value, least, most); a value of None is left out, a most of None open.

    Errors: ConfigError.
    """
    for name, (value, least, most) in fields.items():
        if value is not None and not least <= value <= (value if most is None else most):
            bounds = f"{least} and more" if most is None else f"{least} … {most}"
            raise ConfigError(f"{task}: {name}={value}; allowed: {bounds}")
