"""The same weights in transformers, for comparisons only (extra "peers")."""

import contextlib
import time

import numpy as np

from kvlab.errors import KvlabError
from kvlab.models import fetch


def load(name: str):
    """transformers' model in fp32 on the weights that kvlab uses."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise KvlabError(f"{error}; install the peers: pip install -c constraints.txt -e '.[peers]'") from error
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    return AutoModelForCausalLM.from_pretrained(fetch.find(name), dtype=torch.float32).eval()


class Peer:
    """Prefill and greedy decoding through transformers' DynamicCache, timed."""

    def __init__(self, name: str):
        self.model = load(name)

    def prefill(self, ids):
        """Last logits `[B, V]`, the cache, and seconds."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        begin = time.perf_counter()
        out = self.model(torch.tensor(ids), past_key_values=cache, logits_to_keep=1)
        return out.logits[:, -1].numpy(), cache, time.perf_counter() - begin

    def decode(self, cache, first, steps: int, forced=()):
        """Feeds `forced` and then what it samples: the tokens sampled, and seconds per step."""
        import torch

        token, sampled, seconds = torch.tensor(np.asarray(first))[:, None], [], []
        for i in range(steps):
            if i < len(forced):
                token = torch.full_like(token, forced[i])
            begin = time.perf_counter()
            token = self.model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - begin)
            sampled.append(token[:, 0].numpy())
        return np.stack(sampled, 1), seconds


@contextlib.contextmanager
def cropped(cache, length: int):
    """Lets a cache grow and cuts it back afterwards."""
    yield cache
    cache.crop(length)
