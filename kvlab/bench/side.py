"""kvlab's side of a comparison with kvpress's pipeline, timed: a policy of each method, answers, likelihoods."""

import time

import numpy as np

from kvlab import models, parts
from kvlab.bench import parity
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
        """The greedy answer of each sample, and seconds; of the prefill only a replay, for the method that needs it."""
        begin = time.perf_counter()
        session = self._start(prompt, method, ratio, batch)
        for _ in range(max(map(len, batch.forced)) - 1 + new_tokens):
            session.run(1)
        seconds = time.perf_counter() - begin + (prompt.replay_seconds if method in REPLAYS else 0.0)
        return [self.engine.model.tokenizer.decode(ids[:new_tokens]) for ids in session.answers()], seconds

    def logits(self, prompt: Prefilled, method: str, ratio: float, batch: Batch) -> np.ndarray:
        """Logits `[steps, B, V]` of what follows each prompt."""
        session = self._start(prompt, method, ratio, batch)
        return np.stack([np.asarray(session.run(1, ("logits",)).logits[0]) for _ in range(batch.new_tokens)])

    def _start(self, prompt: Prefilled, method: str, ratio: float, batch: Batch) -> Session:
        made = policy(method, ratio, batch)
        return self.engine.start(prompt, made, batch.new_tokens, batch.rows, batch.forced, self.engine.model.stops)
