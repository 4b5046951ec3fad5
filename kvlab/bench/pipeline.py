"""kvpress's own way with a context and questions about it, on kvlab's prompts (extra "peers").

What runs is `KVPressTextGenerationPipeline`: the context goes through the model once while a press compresses it, and the cache
is restored after each question. Its template and its tokenizer are left out, so that token ids are those that kvlab gets.
"""

import copy
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvlab.bench import kvzip, peers, presses
from kvlab.models import Model
from kvlab.tasks import Batch

HIDE = ("adakv(expected_attention)", "kvzip")  # all tokens stay stored
PIECE = 8  # tokens that are fed at once where a press hides tokens: it may find no key that is far from all of more queries


class Answered(NamedTuple):
    """Greedy answers of a batch's samples, seconds, and logits `[T, V]` after every token of each turn that was fed besides."""

    texts: list[str]
    seconds: float
    logits: list[np.ndarray]


class Pipeline:
    """A model behind kvpress's pipeline. Errors: KvlabError without the extra."""

    def __init__(self, ours: Model):
        model = peers.load(ours.name)
        from kvpress.pipeline import KVPressTextGenerationPipeline

        self.pipe = KVPressTextGenerationPipeline(model=model, tokenizer=kvzip.Words(ours.tokenizer, ours.stops))

    def answers(self, method: str, ratio: float, batch: Batch, new_tokens: int, turns: Sequence[Sequence[int]] = ()) -> Answered:
        """The answer of each sample, one context after another, and seconds, prefill included.

        The `turns` (one for each sample, or none) are fed afterwards, each to the same compressed context and in one piece, as
        a question is. They are not timed.
        """
        rows: dict[int, tuple[str, Any]] = {}
        seconds = 0.0
        for i, prompt in enumerate(batch.prompts):
            mine = [row for row, of in enumerate(batch.rows) if of == i]
            questions = [_tensor(batch.forced[row]) for row in mine]
            begin = time.perf_counter()
            cache, texts = self._ask(presses.press(method, ratio), _tensor(prompt), questions, new_tokens)
            seconds += time.perf_counter() - begin
            more = [self.fed(cache, turns[row], len(prompt)) if turns else None for row in mine]
            rows |= dict(zip(mine, zip(texts, more)))
        answers = [rows[row][0] for row in range(len(batch.rows))]
        return Answered(answers, seconds, [rows[row][1] for row in range(len(batch.rows))] if turns else [])

    def _ask(self, press, ids, questions, new_tokens: int) -> tuple[Any, list[str]]:
        """The compressed cache of a context, and an answer to each question."""
        from transformers import DynamicCache

        cache, answers = DynamicCache(), []
        if not kvzip.replays(press):
            return cache, self.pipe._forward({"context_ids": ids, "questions_ids": questions}, new_tokens, press, cache)
        self.pipe.model.model(ids, past_key_values=cache)
        kvzip.replay(press, self.pipe.model, ids, cache, self.pipe.tokenizer)
        for question in questions:
            lengths = [cache.get_seq_length(layer) for layer in range(len(cache))]
            answers.append(self.pipe.generate_answer(question, cache, ids.shape[1], new_tokens))
            self.pipe._remove_answer_from_cache(cache, lengths)
        return cache, answers

    def passed(self, ids: list[int]) -> presses.Prompted:
        """A prompt's one pass, which serves every press: what one keeps depends on it and changes nothing in it."""
        return presses.passed(self.pipe.model, ids)

    def compressed(self, at: presses.Prompted, method: str, ratio: float) -> Any:
        """The cache that a press leaves of a prompt, as in the pipeline. What it hides stays hidden until the next."""
        press, cache = presses.press(method, ratio), copy.deepcopy(at.cache)
        for layer in self.pipe.model.model.layers:
            layer.self_attn.masked_key_indices = None
        if kvzip.replays(press):
            kvzip.replay(press, self.pipe.model, _tensor(at.ids), cache, self.pipe.tokenizer)
            return cache
        press.post_init_from_model(self.pipe.model)
        for module, *seen in at.layers:
            layer = cache.layers[module.layer_idx]
            layer.keys, layer.values = press.compress(module, *seen)
        return cache

    def fed(self, cache, ids: Sequence[int], start: int, step: int | None = None) -> np.ndarray:
        """Logits `[T, V]` after every token of a turn that begins at `start`, fed `step` at once; then it is forgotten."""
        lengths, made = [cache.get_seq_length(layer) for layer in range(len(cache))], []
        for at in range(0, len(ids), step or len(ids)):
            some = ids[at : at + (step or len(ids))]
            where = _tensor(range(start + at, start + at + len(some)))
            out = self.pipe.model(_tensor(some), past_key_values=cache, position_ids=where)
            made.append(out.logits[0].float().numpy())
        self.pipe._remove_answer_from_cache(cache, lengths)
        return np.concatenate(made)


def _tensor(ids):
    import torch

    return torch.tensor([list(ids)])
