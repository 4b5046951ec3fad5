"""kvpress's KVzip on kvlab's token ids: its replay without the chat template that its own entry point wants (extra "peers")."""

import contextlib
from typing import Any

import numpy as np

from kvlab.bench.presses import Prompted

REQUEST = "\n\nRepeat the previous context exactly."  # kvpress's words before a replay, then END
END = "\n"


class Words:
    """A kvlab tokenizer as kvpress calls one: without a chat template, and `stops` are not text."""

    chat_template, model_max_length = None, 1 << 30

    def __init__(self, tokenizer, stops=()):
        self.tokenizer, self.stops = tokenizer, stops

    def encode(self, text, return_tensors="pt", add_special_tokens=False):
        import torch

        return torch.tensor([self.tokenizer.encode(text)])

    def decode(self, ids, skip_special_tokens=True):
        return self.tokenizer.decode([i for i in ids.tolist() if i not in self.stops])


def replays(press) -> bool:
    return hasattr(press, "_perform_kvzip_compression")


def replay(press, model, ids, cache, words: Words) -> None:
    """KVzip's passes over a prompt `[1, T]` that lies in the cache; what it drops, its layers mask from then on."""
    press.prefix_length, press._suffix_ids = 0, words.encode(END)
    press._context_ids, press._cache = ids, cache
    press._perform_kvzip_compression(model, words)


def replayed(press, at: Prompted, tokenizer):
    """As `kept` for KVzip: what its masks leave, and the scores of its replay before it pins the first tokens."""
    import torch

    found: list[Any] = []
    original, modules = press.compress_post, [layer.self_attn for layer in at.model.model.layers]

    def compress_post(model):
        found.append(press.score_val.clone())
        original(model)

    press.compress_post = compress_post
    with _attention(at.model, "sdpa"):
        replay(press, at.model, torch.tensor([at.ids]), at.cache, Words(tokenizer))
    scores = found[0][:, 0].numpy()
    mask = np.ones(scores.shape, bool)
    for layer, module in enumerate(modules):
        _, head, place = module.masked_key_indices
        mask[layer, head.numpy(), place.numpy()] = False
        module.masked_key_indices = None
    return mask, scores


@contextlib.contextmanager
def _attention(model, kind: str):
    before = model.config._attn_implementation
    model.set_attn_implementation(kind)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
