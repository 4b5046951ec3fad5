"""What a context's tokens are worth to a model that repeats the context: KVzip, https://arxiv.org/abs/2505.23416, section 3.

    context    The magic number for Oslo is 48213. Then ...
    replay     Repeat the previous context: The magic number for Oslo is 48213. Then ...
               └ each query here weighs the context's keys; a key's importance is the largest weight that it gets

No question has to be known: what is needed to say all of the text again serves any question about it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab import compilation
from kvlab.attention import MASKED, AttentionSpec
from kvlab.core import EMPTY, Record
from kvlab.errors import CapacityError, ConfigError
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind

BLOCK = 64  # tokens whose weights are held at a time, of one KV head
CHUNK = 2048  # tokens of the context that one replay repeats, as in the article
WIDTH = 256  # replays are padded to a multiple of this
LEAD = 8  # tokens before a chunk that tell which part is to be repeated
FIRST, NEXT, END = "\n\nRepeat the previous context:\n", "\n\nRepeat the previous context starting with", ":\n"


def weigh(query_BRHGD, key_BHSD, value_BHSD, pos_BS, now_BR, spec: AttentionSpec):
    """Exact attention `[B, R, H, G, D]`, and the largest weight `[B, H, S]` that a later query of any of the G heads gave a key.

    Weights are shares of the softmax over all that a query sees, itself included; positions EMPTY are pads. R must be a
    multiple of BLOCK or smaller than it.
    """
    B, R, H, G, D = query_BRHGD.shape
    block = min(BLOCK, R)
    if R % block:
        raise ValueError(f"{R} queries are no multiple of the block {block}; pad them")
    query = jnp.moveaxis(query_BRHGD * spec.scale, 2, 1).reshape(B, H, R // block, block, G, D)
    now = now_BR.reshape(B, R // block, block)

    def head(n):
        row, head = n // H, n % H
        keys = key_BHSD[row, head], value_BHSD[row, head], pos_BS[row]
        step = lambda most, x: _weigh_block(most, x, keys, spec)
        return lax.scan(step, jnp.zeros(key_BHSD.shape[2]), (query[row, head], now[row]))

    most, out = lax.map(head, jnp.arange(B * H))
    return jnp.moveaxis(out.reshape(B, H, R, G, D), 1, 2), most.reshape(B, H, -1)


def _weigh_block(most_S, queries, keys, spec: AttentionSpec):
    """One block's share of `weigh`: the largest weights so far, and the block's output `[Q, G, D]`."""
    (query_QGD, now_Q), (key_SD, value_SD, pos_S) = queries, keys
    now = now_Q[:, None]
    logits = spec.cap(jnp.einsum("qgd,sd->qgs", query_QGD, key_SD))
    logits = jnp.where(spec.sees(pos_S, now)[:, None], logits, MASKED)
    top = jnp.maximum(logits.max(-1, keepdims=True), MASKED / 2)  # so a pad, which sees nothing, weighs nothing
    weight = lax.optimization_barrier(jnp.exp(logits - top))  # computed once, not inside every use
    share = 1 / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    later = jnp.where(pos_S < now, 1.0, 0.0)[:, None] * share
    return jnp.maximum(most_S, (weight * later).max((0, 1))), jnp.einsum("qgs,sd->qgd", weight, value_SD) * share


@functools.partial(jax.jit, static_argnames="config", compiler_options=compilation.memory_first())
def run(config: ModelConfig, params, records: tuple[Record, ...], tokens_BR, length_B, count_B):
    """Per layer, the largest weight `[B, H, T]` that the tokens give their prompts' keys.

    Row b's first `count` tokens follow its prompt of `length` tokens, whose keys the records hold.
    """
    model = bind(config, params)
    step_R = jnp.arange(tokens_BR.shape[1])
    true_BR = length_B[:, None] + step_R
    now_BR = jnp.where(step_R < count_B[:, None], true_BR, EMPTY)
    found = []

    def attend(layer, query, key, value, _):
        record = records[layer]
        keys, values = (
            jnp.concatenate([old, jnp.swapaxes(new, 1, 2)], 2)
            for old, new in ((record.key_BHTD, key), (record.value_BHTD, value))
        )
        pos = jnp.concatenate([record.pos_BT, now_BR], 1)
        out, most = weigh(query, keys, values, pos, now_BR, config.attention(layer))
        found.append(most[:, :, : record.pos_BT.shape[1]])
        return out

    model(tokens_BR, true_BR, attend)
    return tuple(found)


def requests(model: Model) -> list[list[int]]:
    """The token ids of FIRST, NEXT and END. Errors: ConfigError where the model has no words for them."""
    try:
        return [model.tokenizer.encode(text) for text in (FIRST, NEXT, END)]
    except Exception as error:  # tokenizers raises nothing narrower for a word that is not in its vocabulary
        raise ConfigError(
            f"{model.name} has no tokens for the request to repeat a prompt ({error}); use a retention that needs no replay"
        ) from error


def replays(model: Model, prompt: Sequence[int], chunk: int) -> list[list[int]]:
    """The token ids that repeat a prompt, `chunk` tokens of it at a time, each with the request for it before."""
    first, after, end = requests(model)
    parts = []
    for begin in range(0, len(prompt), chunk):
        ask = [*after, *prompt[max(begin - LEAD, 0) : begin], *end] if begin else first
        parts.append([*ask, *prompt[begin : begin + chunk]])
    return parts


def importance(model: Model, prompts: Sequence[Sequence[int]], records: tuple[Record, ...], chunk: int = CHUNK):
    """Per layer, float32 `[B, H, T]`: the largest weight that a prompt's tokens get while the model repeats the prompt.

    Every chunk's queries see, and share their weights among, the whole prompt and their own replay; the article leaves the
    other chunks out of the denominator, which is the same for prompts of up to CHUNK tokens.
    Errors: CapacityError where a prompt leaves the model no room to repeat any of it, ConfigError where it cannot be asked to.
    """
    config, longest = model.config, max(map(len, prompts))
    first, after, end = requests(model)
    asking = max(len(first), len(after) + LEAD + len(end))
    chunk = min(chunk, config.context - longest - asking)
    if chunk < 1:
        raise CapacityError(
            f"a prompt of {longest} tokens and a request of {asking} to repeat it leave nothing of the {config.context} that "
            f"{model.name} takes; shorten the prompt or use a retention that needs no replay"
        )
    parts = [replays(model, prompt, chunk) for prompt in prompts]
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    found = None
    for turn in range(max(map(len, parts))):
        rows = [part[turn] if turn < len(part) else [] for part in parts]
        count = np.array([len(row) for row in rows], np.int32)
        new = run(config, model.params, records, _padded(rows), length, count)
        found = new if found is None else tuple(map(jnp.maximum, found, new))
    return found


def _padded(rows) -> np.ndarray:
    made = np.zeros((len(rows), -(-max(map(len, rows)) // WIDTH) * WIDTH), np.int32)
    for row, ids in zip(made, rows):
        row[: len(ids)] = ids
    return made
