"""What heads do, measured once for each model: where their queries point (for the retention `q_filters`), how much they attend
to that is far away (for `duoattention`), and how many tokens they need of what all heads keep (for `head_budgets`)."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import attention, compilation, models
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind
from kvlab.retention.head_budgets import KEPT
from kvlab.tasks import text as texts
from kvlab.train import targets
from kvlab.train.gate import record
from kvlab.train.gate.config import Data

SINKS, RECENT = 4, 256  # what a streaming head sees


@functools.partial(jax.jit, static_argnames="config", compiler_options=compilation.memory_first())
def moments(config: ModelConfig, params, tokens_BT):
    """Sums over rotated queries q of every layer's KV heads: qqᵀ `[L, H, D, D]` and q `[L, H, D]`."""
    model, found = bind(config, params), []

    def attend(layer, query, key, value, x):
        found.append((jnp.einsum("bthgd,bthge->hde", query, query), query.sum((0, 1, 3))))
        return attention.prefill(query, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), config.attention(layer))

    model(tokens_BT, jnp.arange(tokens_BT.shape[1])[None], attend)
    return tuple(map(jnp.stack, zip(*found)))


def directions(model: Model, contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """Float32 `[L, H, D]`, of length 1: the first right singular vector of a KV head's queries, away from them.

    With Q the rotated queries of all contexts, one a row, it is the top eigenvector of QᵀQ. A filter f has mean(Q f) ≤ 0, so
    that long projections of a key on it mean little attention (`kvlab.retention.QFilters`).
    """
    found = [jax.tree.map(np.float64, moments(model.config, model.params, jnp.asarray([ids]))) for ids in contexts]
    square, total = (np.sum(each, 0) for each in zip(*found))
    first = np.linalg.eigh(square)[1][..., -1]
    toward = np.where((first * total).sum(-1, keepdims=True) > 0, 1, -1)
    return (-toward * first).astype(np.float32)


@functools.partial(jax.jit, static_argnames="config", compiler_options=compilation.memory_first())
def far(config: ModelConfig, params, tokens_BT):
    """Attention of the text's second half to tokens that are neither its first SINKS nor the query's last RECENT, `[L, H]`.

    The mean over queries and over the query heads of a KV head.
    """
    model, found = bind(config, params), []
    T = tokens_BT.shape[1]
    now, pos = jnp.arange(T // 2, T)[:, None], jnp.arange(T)

    def attend(layer, query, key, value, x):
        spec = config.attention(layer)

        def head(n):
            logits = spec.cap(jnp.einsum("qgd,td->gqt", query[0, T // 2 :, n] * spec.scale, key[0, :, n]))
            weight = jax.nn.softmax(jnp.where(spec.sees(pos, now), logits, attention.MASKED), -1)
            return jnp.where((pos >= SINKS) & (pos <= now - RECENT), weight, 0.0).sum(-1).mean()

        found.append(jax.lax.map(head, jnp.arange(config.kv_heads)))
        return attention.prefill(query, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), spec)

    model(tokens_BT, pos[None], attend)
    return jnp.stack(found)


def profile(model: Model, contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """Float32 `[L, H]`: `far` on texts that say the same twice, so that heads that retrieve have something to retrieve."""
    twice = [[*ids[: len(ids) // 2], *ids[: len(ids) // 2]] for ids in contexts]
    return np.mean([far(model.config, model.params, jnp.asarray([ids])) for ids in twice], 0).astype(np.float32)


def budgets(model: Model, contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """Float32 `[K, L, H]`: what share of each head's tokens lies above the threshold that keeps a share `KEPT[k]` of all heads'.

    By the importance that a replay of each text gives them (`kvlab.train.targets.replayed`). Layers with a local window take no
    part and keep the same share as all.
    """
    wide = np.array([model.config.window(layer) is None for layer in range(model.config.layers)])
    made = []
    for ids in contexts:
        importance = targets.replayed(model, ids)
        least = np.quantile(importance[wide], 1 - np.array(KEPT), axis=None)
        share = np.stack([(importance > x).mean(-1) for x in least])
        made.append(np.where(wide[:, None], share, np.reshape(KEPT, (-1, 1, 1))))
    return np.mean(made, 0).astype(np.float32)


def save(found: dict[str, np.ndarray], path: str | Path, about: dict[str, Any]) -> None:
    """Writes the arrays, and in the header what they were made from; whole or not at all."""
    from safetensors.numpy import save

    from kvlab.experiment.store import writing

    with writing(Path(path)) as part:
        part.write_bytes(
            save({k: np.ascontiguousarray(x) for k, x in found.items()}, {"origin": json.dumps(about, sort_keys=True)})
        )


def calibrate(model: str, text: str, contexts: int, length: int, path: str | Path) -> dict[str, Any]:
    """Writes a model's filters, profile and budgets, made from a text (`kvlab.tasks.text`); returns the file's header."""
    compilation.use_private_cache()
    data, loaded = Data(contexts, (text,), length=length), models.load(model)
    ids = [record.prompt(data, loaded.tokenizer, index) for index in range(contexts)]
    made = {"model": model, "digest": loaded.digest, "text": text, "text_digest": texts.digest(text)}
    about = {**made, "contexts": contexts, "length": length}
    found = {"filters": directions(loaded, ids), "profile": profile(loaded, ids), "budgets": budgets(loaded, ids)}
    save(found, path, about)
    return about
