"""Selections as a naive program would write them, in numpy: scores, how many, which. One row and head at a time."""

import ml_dtypes
import numpy as np

from kvlab.core import PAGE
from kvlab.selection import DoubleSparsity, HySparse, KeyNorm, Lightning, Oracle, Quest, Random, Recency, TopP

ROUNDING = {
    "float32": lambda x: x,
    "float16": lambda x: x.astype(np.float16).astype(np.float32),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "int8": lambda x: np.round(x * 127) / np.float32(127),
}


def softmax(x):
    weight = np.exp(x - x.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def logsumexp(x, axis=-1):
    top = x.max(axis, keepdims=True)
    return (top + np.log(np.exp(x - top).sum(axis, keepdims=True))).squeeze(axis)


def count(length: int, sparsity: float, most: int | None = None) -> int:
    """K; a hundredth of a token is forgiven."""
    number = max(int(np.ceil((1 - sparsity) * length - 0.01)), min(length, 1))
    return number if most is None else min(number, most)


def top(score, ok, pos, number: int):
    """The `number` best, ties to the newest, as a mask."""
    order = [i for i in np.lexsort((-pos, -score)) if ok[i]][:number]
    return np.isin(np.arange(len(score)), order)


def tokens(selection, score, ok, pos, number: int):
    """What is read of slots: sinks and recent ones inside K, then by score."""
    now = pos[ok].max(initial=-1)
    first = min(selection.sinks, max(number - 1, 0))
    last = min(max(selection.recent, 1), number - first)
    forced = (pos < first) | (pos > now - last)
    return top(np.where(forced, np.inf, score), ok, pos, number)


def few(weight, mass: float) -> int:
    """How few of the weights sum up to `mass`; a thousandth of the last one is forgiven."""
    total, falling = 0.0, np.sort(np.asarray(weight, np.float64))[::-1]
    for number, x in enumerate(falling):
        if total >= mass - 1e-3 * x or x == 0:
            return number
        total += x
    return len(falling)


def top_p(selection, logits_GX, pos, ok):
    """What is read so that the share p is covered: sinks and recent ones first, then by attention."""
    weight = softmax(np.where(ok, logits_GX, -1e30).astype(np.float64)).mean(0) * ok
    length, p = int(ok.sum()), float(selection.p)
    most = length if selection.max_k is None else min(length, selection.max_k)
    first = min(selection.sinks, max(most - 1, 0))
    last = min(max(selection.recent, 1), most - first)
    forced = ok & ((pos < first) | (pos > pos[ok].max(initial=-1) - last))
    number = length if p >= 1 else forced.sum() + few(weight[ok & ~forced], p - weight[forced].sum())
    return top(np.where(forced, np.inf, weight), ok, pos, min(number, most))


def channels(key_XD, number: int):
    """The channels of largest mean |k|, ascending; among equals the lower ones."""
    return np.sort(np.argsort(-np.abs(key_XD).sum(0), kind="stable")[:number])


def pages(selection, score_N, ok_NP, pos_NP, number: int):
    """What is read of pages: the newest, sinks, recent ones, then by score; as many as hold K tokens, rounded."""
    held, newest = ok_NP.sum(-1), np.where(ok_NP, pos_NP, -1).max(-1)
    if not held.any():
        return held > 0
    current, now = int(newest.argmax()), newest.max()
    rest = held.sum() - held[current]
    each = rest / max((held > 0).sum() - 1, 1) or 1
    many = 1 + int(np.floor(max(number - held[current], 0) / each + 0.5))
    if selection.max_k is not None:
        many = min(many, 1 + max(selection.max_k - held[current], 0) // PAGE)
    kind = np.zeros(len(held))
    kind[newest > now - selection.recent] = 1
    kind[(ok_NP & (pos_NP < selection.sinks)).any(-1)] = 2
    kind[current] = 3
    order = [n for n in np.lexsort((-newest, -score_N, -kind)) if held[n]][:many]
    return np.isin(np.arange(len(held)), order)


def mixed(x):
    """The finaliser of MurmurHash3, on Python integers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def spatial(layer, query_GD, key_XD, head: int, rounding=ROUNDING["float32"], ok=None):
    """Scores of the Spatial Gating Module for one head of a layer whose inputs are not rotated back."""
    w, u, scale, heat = (np.asarray(x) for x in (layer.key_DR, layer.query_DR, layer.scale_R, layer.heat_H))
    lift = np.eye(w.shape[1]) if layer.lift_RE is None else np.asarray(layer.lift_RE)
    index, query = rounding((unit(key_XD @ w * scale) @ lift).astype(np.float32)), unit(query_GD @ u * scale) @ lift
    scores = np.exp(heat[head]) * query @ index.T
    if layer.pool == "mean":
        return scores.mean(0)
    scores = scores if ok is None else np.where(ok, scores, -1e30)
    return np.log(softmax(scores).mean(0) + 1e-300)


def lightning(layer, query_GD, key_XD, head: int, rounding=ROUNDING["float32"]):
    u, w, weight = (np.asarray(x) for x in (layer.query_NDR, layer.key_DR, layer.weight_HN))
    index = rounding(unit(key_XD @ w).astype(np.float32))
    heads = np.einsum("gd,ndr->gnr", query_GD, u)
    return np.einsum("n,gnx->x", weight[head], np.maximum(np.einsum("gnr,xr->gnx", heads, index), 0))


def scores(selection, query_GD, key_XD, logits_GX, pos, ok, head: int, held):
    """Scores of every slot. `key` is exact; `logits` are of what is stored; `held` is what it learned from the prompt."""
    if isinstance(selection, Random):
        time = mixed((int(pos[ok].max(initial=-1)) * 65_537 + head * 257 + selection.seed) % 2**32)
        return np.array([mixed((int(p) + time) % 2**32) >> 8 for p in pos], np.float32)
    if isinstance(selection, Recency):
        return pos.astype(np.float32)
    if isinstance(selection, KeyNorm):
        return -np.linalg.norm(key_XD, axis=-1)
    if isinstance(selection, Oracle):
        return softmax(np.where(ok, logits_GX, -1e30)).mean(0)
    if isinstance(selection, DoubleSparsity):
        return (query_GD[:, held] @ ROUNDING["float16"](key_XD[:, held]).T).mean(0)
    if isinstance(selection, HySparse):
        score = spatial(selection.layer, query_GD, key_XD, head, ROUNDING[selection.dtype], ok)
    elif isinstance(selection, Lightning):
        score = lightning(selection.layer, query_GD, key_XD, head, ROUNDING[selection.dtype])
    else:
        raise TypeError(selection)
    return windowed(score, ok, {"none": 0, "softmax": 1, "tempered": 1 - selection.alpha}[selection.window_norm])


def windowed(score, ok, flattening):
    mass = logsumexp(np.where(ok, score, -1e30).reshape(-1, PAGE))
    return score - flattening * np.repeat(mass, PAGE)


def bounds(query_GD, held_by_page):
    """Quest's bound of each page from the keys that it held."""
    worth = lambda keys: np.maximum(query_GD * keys.max(0), query_GD * keys.min(0)).sum(-1).mean()
    return np.array([worth(keys) if len(keys) else 0.0 for keys in held_by_page])


def select(selection, query_GD, key_XD, logits_GX, pos_NP, ok, head: int, held):
    """Mask of the slots that are read, flat. `held` is what the selection remembers: keys by page, or channels."""
    pos = pos_NP.reshape(-1)
    if isinstance(selection, TopP):
        return top_p(selection, logits_GX, pos, ok)
    number = count(int(ok.sum()), float(selection.sparsity), selection.max_k)
    if isinstance(selection, Quest):
        score = bounds(query_GD, held)
    else:
        score = scores(selection, query_GD, key_XD, logits_GX, pos, ok, head, held)
        if selection.granularity == "token":
            return ok & tokens(selection, score, ok, pos, number)
        score = np.where(ok, score, -np.inf).reshape(pos_NP.shape).max(-1)
    return ok & np.repeat(pages(selection, score, ok.reshape(pos_NP.shape), pos_NP, number), PAGE)
