"""Why a retention and kvpress's counterpart keep other tokens: reasons that are computed, "" where one does not hold."""

from typing import NamedTuple

import numpy as np

from kvlab import replay
from kvlab.bench import kvzip, presses
from kvlab.core import kept
from kvlab.decode import Prefilled
from kvlab.models import Model

TIE = 1e-5
CHUNK, SINKS, LAG = 20, 4, 128


class Case(NamedTuple):
    """A model on both sides after the same prompt, and random Q-filters, as an array and as a file."""

    name: str
    model: Model
    ours: Prefilled
    theirs: presses.Prompted
    filters: np.ndarray
    file: str


class Pair(NamedTuple):
    """What both sides keep at a ratio, `[L, H, T]`, and kvpress's scores."""

    case: Case
    ratio: float
    ours: np.ndarray
    theirs: np.ndarray
    scores: np.ndarray

    @property
    def length(self) -> int:
        return self.ours.shape[-1]


def top(scores: np.ndarray, number: int) -> np.ndarray:
    """The mask of the highest scores along the last axis, ties to the newest."""
    length = scores.shape[-1]
    order = np.lexsort((np.broadcast_to(np.arange(length), scores.shape), scores), axis=-1)[..., length - number :]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, True, -1)
    return mask


def tie(ours: np.ndarray, theirs: np.ndarray, scores: np.ndarray) -> str:
    """The reason where all that differs is a tie at the cut, else nothing.

    Near is `TIE` of the score at the cut. Where a head's scores have both signs that may be next to nothing, while rounding goes
    with the terms that cancel: there it is `TIE` of the median |score|, if that is more.
    """
    if (ours.sum(-1) != theirs.sum(-1)).any():
        return ""
    cut = np.where(theirs, scores, np.inf).min(-1, keepdims=True)
    signed = (scores > 0).any(-1, keepdims=True) & (scores < 0).any(-1, keepdims=True)
    scale = np.where(signed, np.median(np.abs(scores), -1, keepdims=True), 0.0)
    differ, near = ours != theirs, TIE * np.maximum(np.abs(cut), scale)
    if (differ & ~(np.abs(scores - cut) <= near)).any():
        return ""
    return f"ties at the cut in {differ.any(-1).sum()} of {differ[..., 0].size} heads: scores within {TIE} of each other"


def chunks(pair: Pair) -> str:
    """kvpress keeps ⌊chunks · (1 − ratio)⌋ whole chunks; kvlab fills its budget with the newest of one more."""
    begin = np.arange(0, pair.length, CHUNK)
    size = np.diff(np.r_[begin, pair.length])
    mean = np.add.reduceat(pair.scores.sum(1), begin, -1) / size
    rank = np.argsort(np.argsort(-mean, -1), -1).repeat(size, -1)[:, None]
    whole, number = max(1, int(len(begin) * (1 - pair.ratio))), kept(pair.length, pair.ratio)
    budget = top(-rank * pair.length + np.arange(pair.length), number)
    if not ((pair.theirs == (rank < whole)).all() and (pair.ours == budget).all()):
        return ""
    return f"kvpress keeps {whole} whole chunks of {CHUNK}, kvlab {number} tokens, {number % CHUNK} of them of one more chunk"


def constant(pair: Pair) -> str:
    """Of LagKV: where a channel is constant over the next partition, kvpress divides by its width 0 and ranks what is no number.

    Only there, or in ties at the cut, may the two differ; ranks are shares of a partition, so the others keep their own.
    """
    partitions = (pair.length - SINKS) // LAG
    flat = np.zeros((*pair.ours.shape[:2], partitions), bool)
    for layer, (_, _, *both, _, _) in enumerate(pair.case.theirs.layers):
        for x in both:
            inside = np.asarray(x[0, :, SINKS : SINKS + partitions * LAG])
            inside = inside.reshape(len(inside), partitions, LAG, -1)
            flat[layer, :, :-1] |= (np.ptp(inside, 2) == 0).any(-1)[:, 1:]
    spoilt = np.zeros(pair.ours.shape, bool)
    spoilt[..., SINKS : SINKS + partitions * LAG] = flat.repeat(LAG, -1)
    cut = np.where(pair.theirs, pair.scores, np.inf).min(-1, keepdims=True)
    if ((pair.ours != pair.theirs) & ~spoilt & ~(np.abs(pair.scores - cut) <= TIE * np.abs(cut))).any():
        return ""
    heads = (pair.ours != pair.theirs) & spoilt
    return f"kvpress divides by 0 in {heads.any(-1).sum()} of {heads[..., 0].size} heads: a channel is constant over 128 tokens"


def halves(pair: Pair) -> str:
    """Of CriticalKV over key norms: a tie at the cut of the first half leaves the second half another number to choose.

    Tokens that are tied there may be in either half. All others have to be where their norm, then their norm times their value's
    weight, puts them, on both sides and up to a tie.
    """
    of_prompt = lambda x: np.asarray(x, np.float64)[0, :, : pair.length]
    norm = -np.stack([np.linalg.norm(of_prompt(record.key_BHTD), axis=-1) for record in pair.case.ours.records])
    weight = np.stack([of_prompt(record.seen["output_norm"]) for record in pair.case.ours.records])
    cut = -np.sort(-norm, -1)[..., [int(kept(pair.length, pair.ratio) * 0.5) - 1]]
    tied = np.abs(norm - cut) <= TIE * np.abs(cut)
    first, scores = (norm > cut) & ~tied, (norm + 1e-4) * weight
    for side in (pair.ours, pair.theirs):
        least = np.where(side & ~first & ~tied, scores, np.inf).min(-1)
        most = np.where(~side & ~first & ~tied, scores, -np.inf).max(-1)
        if (first & ~side).any() or (most - least > TIE * np.abs(least)).any():
            return ""
    return (
        f"ties at the cut of the first half in {(tied.sum(-1) > 1).sum()} of {tied[..., 0].size} heads, and what follows of them"
    )


def replays(pair: Pair) -> str:
    """Asked in kvpress's words, kvlab's replay ranks alike; kvpress then shares the budget out over all layers and heads."""
    case, number = pair.case, kept(pair.length, pair.ratio)
    encode = case.model.tokenizer.encode
    ids = [*encode(kvzip.REQUEST), *encode(kvzip.END), *case.theirs.ids]
    rows = np.zeros((1, -(-len(ids) // replay.WIDTH) * replay.WIDTH), np.int32)
    rows[0, : len(ids)] = ids
    lengths = (np.array([x], np.int32) for x in (pair.length, len(ids)))
    found = replay.run(case.model.config, case.model.params, case.ours.records, rows, *lengths)
    of_prompt = lambda layers: np.stack([np.asarray(x)[0, :, : pair.length] for x in layers])
    same, asked = of_prompt(found), of_prompt([record.seen["importance"] for record in case.ours.records])
    pinned = np.where(np.arange(pair.length) < SINKS, np.inf, pair.scores)
    shared = top(pinned.reshape(-1), pinned.size - int(pinned.size * pair.ratio)).reshape(pinned.shape)
    if not (pair.ours == top(asked, number)).all():
        return ""
    mine, own = top(same, number), top(pair.scores, number)
    if not ((shared == pair.theirs).all() or tie(shared.reshape(1, -1), pair.theirs.reshape(1, -1), pinned.reshape(1, -1))):
        return ""
    alike = (mine == own).all() or tie(mine, own, pair.scores)
    words = "kvpress asks for the replay in other words, pins 4 sinks and lets one threshold run through all layers and heads"
    return f"{words}; asked in its words, kvlab keeps the same tokens at a budget per head" if alike else ""
