"""kvlab's side of a comparison with kvpress's pipeline, timed: a policy of each method, answers, logits."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from kvlab import models, parts
from kvlab.bench import parity
from kvlab.bench.once import onward
from kvlab.core import PAGE
from kvlab.decode import Engine, Prefilled, needs
from kvlab.policy import Policy
from kvlab.session import Session
from kvlab.tasks import Batch

REPLAYS = ("kvzip",)


def policy(method: str, ratio: float, batch: Batch) -> Policy:
    """A method that compresses the prompts of a batch and keeps what comes afterwards, token by token."""
    longest = max(map(len, batch.prompts))
    inner = {"name": "window", "sinks": 4} if method == "window" else parity.retention(method, ratio, longest, "")
    room = -(-batch.new_tokens // PAGE) * PAGE  # in pages, so that batches with other questions share their programs
    once = {"name": "kvlab.bench.once:Once", "inner": inner, "ratio": ratio, "room": room, "length": longest}
    return parts.policy({"retention": once})


class Ours:
    """A model behind `Engine`."""

    def __init__(self, name: str):
        self.engine = Engine(models.load(name))

    def prefill(self, batch: Batch, methods: list[str]) -> Prefilled:
        return self.engine.prefill(batch.prompts, needs([policy(method, 0.5, batch) for method in methods]))

    def answers(self, prompt: Prefilled, method: str, ratio: float, batch: Batch, new_tokens: int) -> tuple[list[str], float]:
        """The greedy answer of each sample, and seconds; of the prefill only a replay, for the method that needs it.

        All questions of the prompts go through together as one chunk each, then the answers step by step.
        """
        begin = time.perf_counter()
        session = self._asked(prompt, method, ratio, batch)
        session.extend(batch.forced)
        if new_tokens > 1 and not session.done:
            session.run(new_tokens - 1)
        texts = [self._text(ids) for ids in session.tokens[:, 1:]]  # the first was sampled before the question
        return texts, time.perf_counter() - begin + (prompt.replay_seconds if method in REPLAYS else 0.0)

    def logits(self, prompt: Prefilled, method: str, ratio: float, batch: Batch, turns: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits `[B, T, V]` after every token of a turn of each sample, fed as one chunk."""
        return self._asked(prompt, method, ratio, batch).predict(turns)

    def _asked(self, prompt: Prefilled, method: str, ratio: float, batch: Batch) -> Session:
        """A session with a row for each sample, from caches that each prompt filled once."""
        session = self.engine.start(prompt, policy(method, ratio, batch), batch.new_tokens, stops=self.engine.model.stops)
        session.policies, caches = onward(session.policies, session.state.caches)
        session.state = dataclasses.replace(session.state, caches=caches)
        return session.rows(batch.rows)

    def _text(self, ids: np.ndarray) -> str:
        return self.engine.model.tokenizer.decode([i for i in ids.tolist() if i >= 0 and i not in self.engine.model.stops])
