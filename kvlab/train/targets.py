"""What an importance gate learns from: each token's hidden states, and what later queries make of its keys."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import compilation, loop, replay
from kvlab.core import EMPTY
from kvlab.errors import ConfigError, nearest
from kvlab.gates.importance import rms
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind
from kvlab.session import bucket, padded

FLOOR = -12.0  # of log-importance: weights of e^−12 and less are all the same to a ranking


@functools.partial(jax.jit, static_argnames="config", compiler_options=compilation.memory_first())
def _following(config: ModelConfig, params, tokens_BT, length_B):
    model, found = bind(config, params), []
    pos_T = jnp.arange(tokens_BT.shape[1])
    pos_BT = jnp.where(pos_T < length_B[:, None], pos_T, EMPTY)

    def attend(layer, query, key, value, _):
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        out, most = replay.weigh(query, key, value, pos_BT, pos_BT, config.attention(layer))
        found.append(most)
        return out

    model(tokens_BT, pos_T[None], attend)
    return jnp.stack(found)


def following(model: Model, ids: Sequence[int]) -> np.ndarray:
    """Float32 `[L, H, T]`: the largest attention weight that a token gets from the tokens after it; 0 for the last one.

    Weights are shares of all that a query sees: sinks, recent tokens and itself included.
    """
    found = _following(model.config, model.params, padded([ids], bucket(len(ids))), np.array([len(ids)], np.int32))
    return np.asarray(found[:, 0, :, : len(ids)])


def replayed(model: Model, ids: Sequence[int], chunk: int = replay.CHUNK) -> np.ndarray:
    """Float32 `[L, H, T]`: the largest attention weight that a token gets while the model repeats the context."""
    return _by_replay(model, ids, _prefill(model, ids), chunk)


def _by_replay(model: Model, ids, records, chunk: int) -> np.ndarray:
    found = replay.importance(model, [ids], records, chunk)
    return np.stack([np.asarray(x[0, :, : len(ids)]) for x in found])


def _prefill(model: Model, ids: Sequence[int]):
    tokens, length = padded([ids], bucket(len(ids))), np.array([len(ids)], np.int32)
    return loop.prefill(model.config, model.params, tokens, length, frozenset({"hidden"}))[0]


TEACHERS = {"replay": "the replay of the context", "following": "the context's own later tokens"}


def record_context(model: Model, ids: Sequence[int], teacher: str = "replay", vectors: bool = False) -> dict[str, Any]:
    """A context's training data as arrays, cut to its length.

    Args:
      teacher: whose queries make the target: "replay" or "following".
      vectors: whether keys and values are recorded too, for gates that read them.
    Returns:
      hidden `[L, T, E]` float16, each layer's input over its root mean square (the gate does the same, so nothing is lost
      to float16's range); target `[L, H, T]` float32, log-importance of at least FLOOR; key and value `[L, H, T, D]` float16.
    Errors: ConfigError for an unknown teacher, CapacityError for a context too long to be repeated.
    """
    if teacher not in TEACHERS:
        raise ConfigError(f"teacher={teacher!r}; {nearest(teacher, TEACHERS)}")
    records, n = _prefill(model, ids), len(ids)
    found = following(model, ids) if teacher == "following" else _by_replay(model, ids, records, replay.CHUNK)
    made = {
        "hidden": np.stack([np.asarray(rms(r.seen["hidden"][0, 0, :n]), np.float16) for r in records]),
        "target": np.maximum(np.log(np.maximum(found, 1e-30)), FLOOR).astype(np.float32),
    }
    if vectors:
        made["key"] = np.stack([np.asarray(rms(r.key_BHTD[0, :, :n]), np.float16) for r in records])
        made["value"] = np.stack([np.asarray(rms(r.value_BHTD[0, :, :n]), np.float16) for r in records])
    return made
