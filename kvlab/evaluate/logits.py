"""Paired statistics of two sets of logits on the same tokens, those that llama.cpp's perplexity tool prints."""

import numpy as np


def log_softmax(logits):
    logits = np.asarray(logits, np.float32)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def compare(logits, reference, targets) -> dict[str, np.ndarray]:
    """Per token: `kl` of the policy's distribution from the reference's (nats), `same_top1`, `nll` of both.

    Args:
      logits, reference: `[..., V]`, before softmax.
      targets: `[...]`, the token that came next.
    """
    p, q = log_softmax(reference), log_softmax(logits)
    pick = lambda x: np.take_along_axis(x, np.asarray(targets)[..., None], -1)[..., 0]
    kl = (np.exp(p) * (p - q)).sum(-1, dtype=np.float64)
    return {
        "kl": np.maximum(kl, 0.0),
        "same_top1": p.argmax(-1) == q.argmax(-1),
        "nll": -pick(q).astype(np.float64),
        "nll_reference": -pick(p).astype(np.float64),
    }


def summarise(tokens: dict[str, np.ndarray]) -> dict[str, float]:
    """The usual figures over all tokens of `compare`'s answer."""
    kl = np.asarray(tokens["kl"])
    return {
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_99": float(np.quantile(kl, 0.99)),
        "kl_99_9": float(np.quantile(kl, 0.999)),
        "kl_max": float(kl.max()),
        "same_top1": float(np.mean(tokens["same_top1"])),
        "nll": float(np.mean(tokens["nll"])),
        "delta_nll": float(np.mean(tokens["nll"]) - np.mean(tokens["nll_reference"])),
    }
