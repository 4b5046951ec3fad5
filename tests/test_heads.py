"""A gate beside its teacher, head by head, against plain numpy."""

import numpy as np
import pytest

from kvlab import gates, models
from kvlab.bench import heads
from kvlab.train.gate import record
from kvlab.train.gate.config import Data

pytestmark = pytest.mark.compiled_quickly

DATA = Data(contexts=2, tasks=({"name": "mqar", "length": 96, "pairs": 6, "queries": 6},), queries=6, dtype="float32", seed=3)
NAMES = ("oracle", "gate", "random")
ROWS = 2 * 6 * 2 * 2  # contexts, queries, layers, KV heads


@pytest.fixture(scope="module")
def model():
    return models.load("tiny-recall")


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def seen(model, context, row):
    """One query of every layer and head `[L, H, G, D]`, scaled, the keys that it sees `[L, H, T, D]`, and its position."""
    made = record.context(DATA, model.tokenizer, context)
    shard, now = record.arrays(model, DATA, made, 128), made.pos[row]
    return shard["query"][:, row] * model.config.attention(0).scale, shard["key"][:, :, : now + 1], now


def at(frame, context, layer, kv_head, position):
    place = (frame["context"] == context) & (frame["layer"] == layer) & (frame["kv_head"] == kv_head)
    (row,) = frame[place & (frame["position"] == position)].itertuples()
    return row


def test_what_the_oracle_reads_holds_the_most(model):
    frame = heads.reads(model, "tiny-recall", DATA, 0.9, NAMES, sinks=0, recent=1)
    assert len(frame) == 3 * ROWS and set(frame["position"]) <= set(range(96, 110))
    wide = frame.pivot(index=["context", "position", "layer", "kv_head"], columns="selection", values="attention")
    assert (wide["oracle"] >= wide["gate"] - 1e-6).all() and wide["gate"].mean() > wide["random"].mean() + 0.2
    query, key, now = seen(model, 1, 4)
    weights = softmax(query[1, 0] @ key[1, 0].T).mean(0)
    row = at(frame[frame["selection"] == "oracle"], 1, 1, 0, now)
    assert row.tokens == np.ceil(0.1 * len(weights))
    others = np.sort(weights[:-1])[::-1][: row.tokens - 1]  # the newest is always read
    assert row.attention == pytest.approx(weights[-1] + others.sum(), abs=1e-5)


def test_entropies_are_those_of_plain_softmaxes(model):
    frame = heads.entropies(model, "tiny-recall", DATA)
    assert len(frame) == ROWS
    query, key, now = seen(model, 0, 2)
    gate, places, everything = gates.load("tiny-recall").at(0, model.config), np.arange(now + 1), np.ones((1, 2, now + 1), bool)
    score = gate.scores(query[0][None], gate.index(key[0][None], places), everything, np.full((1, 2), now))
    row, teacher, learned = at(frame, 0, 0, 1, now), softmax(query[0, 1] @ key[0, 1].T).mean(0), softmax(np.asarray(score)[0, 1])
    assert row.entropy == pytest.approx(-(teacher * np.log(teacher)).sum(), abs=1e-4)
    assert row.entropy_most == pytest.approx(np.log(now + 1))
    # index keys are stored in 8 or 16 bits
    assert row.entropy_gate == pytest.approx(-(learned * np.log(learned)).sum(), rel=0.01)
    assert row.apart == pytest.approx((teacher * np.log(teacher / learned)).sum(), rel=0.02)
