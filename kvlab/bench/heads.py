"""A gate beside the attention that it stands in for, head by head, on contexts that it was not trained on.

Both frames have a row for each context, recorded position, layer and KV head. The attention is the mean over the query heads of a
KV head, over all that the query sees, as a gate's teacher is (`kvlab.gates.losses.attention`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import gates
from kvlab.attention import AttentionSpec
from kvlab.bench import recall
from kvlab.core import PAGE
from kvlab.gates import losses
from kvlab.models import Model
from kvlab.selection import SELECTIONS
from kvlab.train.gate import picking, record
from kvlab.train.gate.config import KINDS, Data


def reads(model: Model, gate: str, data: Data, sparsity: float, names: Sequence[str], **forced: int):
    """What selections read at an equal number of tokens: a row for each of `names` (see `kvlab.bench.recall.selections`) too.

    `attention` is the share of it that falls on what was read, `tokens` how many these were. `forced`: `sinks`, `recent`.
    """

    def of_layer(layer: int, query, key, pos, spec):
        made = recall.selections(model.config, gate, sparsity, layer, **forced)
        for name in names:
            mass, tokens = recall.read(made[name], query, key, pos, spec)
            yield {"selection": name, "attention": mass, "tokens": tokens}

    return _frame(model, data, of_layer)


def entropies(model: Model, gate: str, data: Data):
    """How sharp the attention is and how sharp the gate makes it, in nats.

    `entropy`: of the attention; `entropy_gate`: of the softmax of the gate's scores; `apart`: KL of the second from the first,
    which training lowers; `entropy_most`: log of the number of tokens seen.
    """
    trained = gates.load(gate)
    kind = SELECTIONS[KINDS[trained.kind]]

    def of_layer(layer: int, query, key, pos, spec):
        yield sharpness(kind(layer=trained.at(layer, model.config)), query, key, pos, spec)

    return _frame(model, data, of_layer)


@functools.partial(jax.jit, static_argnames="spec")
def sharpness(selection, query_QHGD, key_HTD, pos_Q, spec: AttentionSpec) -> dict[str, Any]:
    """The columns of `entropies`, `[Q, H]` each."""
    query, key, now = (jnp.asarray(x)[None] for x in (query_QHGD, key_HTD, pos_Q))
    score, ok = picking.scores(selection, query * spec.scale, key, now)
    teacher, learned = losses.attention(query, key, ok, spec), jax.nn.softmax(jnp.where(ok, score, losses.HIDDEN), -1)
    entropy = lambda p: -jax.scipy.special.xlogy(p, p).sum(-1)
    apart = jax.scipy.special.rel_entr(jnp.where(ok, teacher, 0), jnp.where(ok, learned, 0)).sum(-1)
    found = {"entropy": entropy(teacher), "entropy_gate": entropy(learned), "apart": apart, "entropy_most": jnp.log(ok.sum(-1))}
    return {name: x[0].T for name, x in found.items()}


def _frame(model: Model, data: Data, of_layer: Callable):
    """A frame of what `of_layer` says of every context's queries and keys: columns that are `[Q, H]`, or the same for all."""
    import pandas as pd

    made = []
    for index in range(data.contexts):
        context = record.context(data, model.tokenizer, index)
        shard = record.arrays(model, data, context, -(-len(context.tokens) // PAGE) * PAGE)
        query, key = (np.asarray(shard[name], np.float32) for name in ("query", "key"))
        for row, layer in enumerate(record.layers(model, data)):
            Q, H = query.shape[1:3]
            place = {"position": np.repeat(context.pos, H), "layer": layer, "kv_head": np.tile(np.arange(H), Q)}
            for found in of_layer(layer, query[row], key[row], shard["pos"], model.config.attention(layer)):
                columns = {k: v if isinstance(v, str) else np.asarray(v).ravel() for k, v in found.items()}
                made.append(pd.DataFrame({"context": index, **place, **columns}))
    return pd.concat(made, ignore_index=True)
