"""Where a model's queries point: one direction per layer and KV head, for the retention `q_filters`."""

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
from kvlab.tasks import text as texts
from kvlab.train.gate import record
from kvlab.train.gate.config import Data


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


def save(filters: np.ndarray, path: str | Path, about: dict[str, Any]) -> None:
    """Writes `{"filters": [L, H, D]}`, and in the header what they were made from; whole or not at all."""
    from safetensors.numpy import save

    from kvlab.experiment.store import writing

    with writing(Path(path)) as part:
        part.write_bytes(save({"filters": np.ascontiguousarray(filters)}, {"origin": json.dumps(about, sort_keys=True)}))


def calibrate(model: str, text: str, contexts: int, length: int, path: str | Path) -> dict[str, Any]:
    """Makes a model's filters from a text (`kvlab.tasks.text`) and writes them; returns what the file says of itself."""
    compilation.use_private_cache()
    data, loaded = Data(contexts, (text,), length=length), models.load(model)
    ids = [record.prompt(data, loaded.tokenizer, index) for index in range(contexts)]
    made = {"model": model, "digest": loaded.digest, "text": text, "text_digest": texts.digest(text)}
    about = {**made, "contexts": contexts, "length": length}
    save(directions(loaded, ids), path, about)
    return about
