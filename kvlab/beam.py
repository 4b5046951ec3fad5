"""Beam search: a small demonstration that caches fork and reorder as rows."""

import numpy as np

from kvlab.decode import Engine
from kvlab.evaluate.logits import log_softmax


def beam_search(engine: Engine, prompt: list[int], policy, width: int, steps: int) -> list[tuple[list[int], float]]:
    """The `width` likeliest continuations found of `steps` tokens, best first, each with its log-probability (nats).

    At every step each beam is extended by every token, the best `width` of all stay, and the caches of their parents follow
    them (Graves, https://arxiv.org/abs/1211.3711, section 2.4, without a length penalty).
    """
    filled = engine.prefill([prompt])
    session = engine.start(filled, policy, steps, rows=[0] * width)
    logp = log_softmax(filled.logits_BV)[0]
    token = np.argsort(-logp, kind="stable")[:width]
    score, text, parent = logp[token], token[:, None], np.arange(width)
    for _ in range(steps - 1):
        session = session.rows(parent, token)
        total = score[:, None] + log_softmax(session.run(1, watch=["logits"]).logits[0])
        best = np.argsort(-total, axis=None, kind="stable")[:width]
        parent, token = np.divmod(best, total.shape[1])
        score, text = total.ravel()[best], np.concatenate([text[parent], token[:, None]], 1)
    return [(row.tolist(), float(s)) for row, s in zip(text, score)]
