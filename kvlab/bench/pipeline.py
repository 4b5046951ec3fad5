"""kvpress's own way with a context and questions about it, on kvlab's prompts (extra "peers").

What runs is `KVPressTextGenerationPipeline`: the context goes through the model once while a press compresses it, and the cache
is restored after each question. Its template and its tokenizer are left out, so that token ids are those that kvlab gets.
"""

import time
from typing import Any

import numpy as np

from kvlab.bench import kvzip, peers, presses
from kvlab.models import Model
from kvlab.tasks import Batch

HIDE = ("adakv(expected_attention)", "kvzip")  # all tokens stay stored


class Pipeline:
    """A model behind kvpress's pipeline. Errors: KvlabError without the extra."""

    def __init__(self, ours: Model):
        model = peers.load(ours.name)
        from kvpress.pipeline import KVPressTextGenerationPipeline

        self.pipe = KVPressTextGenerationPipeline(model=model, tokenizer=kvzip.Words(ours.tokenizer, ours.stops))

    def answers(self, method: str, ratio: float, batch: Batch, new_tokens: int) -> tuple[list[str], float]:
        """The greedy answer of each sample, one context after another, and seconds, prefill included."""
        made: list[str] = [""] * len(batch.rows)
        begin = time.perf_counter()
        for i, prompt in enumerate(batch.prompts):
            mine = [row for row, of in enumerate(batch.rows) if of == i]
            questions = [_tensor(batch.forced[row]) for row in mine]
            for row, answer in zip(mine, self._ask(presses.press(method, ratio), _tensor(prompt), questions, new_tokens)):
                made[row] = answer
        return made, time.perf_counter() - begin

    def _ask(self, press, ids, questions, new_tokens: int) -> list[str]:
        if not kvzip.replays(press):
            return self.pipe._forward({"context_ids": ids, "questions_ids": questions}, new_tokens, press)
        cache, answers = self._compressed(press, ids), []
        for question in questions:
            lengths = [cache.get_seq_length(layer) for layer in range(len(cache))]
            answers.append(self.pipe.generate_answer(question, cache, ids.shape[1], new_tokens))
            self.pipe._remove_answer_from_cache(cache, lengths)
        return answers

    def _compressed(self, press, ids) -> Any:
        """The cache of a context after a press."""
        from transformers import DynamicCache

        cache, model = DynamicCache(), self.pipe.model
        if kvzip.replays(press):
            model.model(ids, past_key_values=cache)
            kvzip.replay(press, model, ids, cache, self.pipe.tokenizer)
            return cache
        with press(model):
            model.model(ids, past_key_values=cache)
        return cache

    def logits(self, method: str, ratio: float, batch: Batch) -> np.ndarray:
        """Logits `[steps, B, V]` of what follows each prompt, fed in one piece as a question is.

        Token by token where a press hides tokens: it can miss a key that is far from all queries of so long a piece.
        """
        made = []
        for prompt, more in zip(batch.prompts, batch.forced):
            cache = self._compressed(presses.press(method, ratio), _tensor(prompt))
            step = 1 if method in HIDE else len(more)
            pieces = [self._feed(cache, more[at : at + step], len(prompt) + at) for at in range(0, len(more), step)]
            made.append(np.concatenate(pieces))
        return np.stack(made, 1)

    def _feed(self, cache, ids: list[int], start: int) -> np.ndarray:
        where = _tensor(range(start, start + len(ids)))
        return self.pipe.model(_tensor(ids), past_key_values=cache, position_ids=where).logits[0].float().numpy()


def _tensor(ids):
    import torch

    return torch.tensor([list(ids)])
