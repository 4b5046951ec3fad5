"""Initial parameters from which induction is a short way: attention begins as what recall needs, roughly, and is trained on."""

import jax.numpy as jnp
import numpy as np

from kvlab.models import transformer
from kvlab.models.config import ModelConfig

SHARED = 0.3  # a component that all words share at first: heads that look at positions alone turn on it
FAST = 6  # rotary pairs that tell one position from the next
SMALL = 0.1  # what is left of plain random weights


def parameters(config: ModelConfig, seed: int) -> dict:
    """Random parameters, with attention's as in mimetic initialisation (https://arxiv.org/abs/2305.09828, section 3).

    Values are copied (out ≈ transposed value) and queries meet keys of like content (query ≈ key). In the first layer the
    first KV head looks at the token before and copies it; later layers look for what it copied.
    """
    params = transformer.init(config, seed)
    rng = np.random.default_rng([2, seed])
    own, moved = _rows(rng, config)
    params["embedding"] = params["embedding"].at[:, 0].add(SHARED)
    for layer, block in params["blocks"].items():
        query, key, value, out = _split(config, block)
        if layer == 0:
            _look_back(config, query, key, value, out, own, moved)
        else:
            _look_up(config, query, key, value, out, own, moved, rng)
        joined = np.concatenate([x.reshape(-1, config.hidden) for x in (query, key, value)])
        block["qkv"] = jnp.asarray(joined, jnp.float32)
        block["out"] = jnp.asarray(out.reshape(-1, config.hidden).T, jnp.float32)
        block["down"] = SMALL * block["down"]
    return params


def _split(config: ModelConfig, block: dict) -> tuple[np.ndarray, ...]:
    """Query `[H, G, D, hidden]`, key and value `[H, D, hidden]`, out `[H, G, D, hidden]` (transposed), all but value small."""
    D, hidden, per_head = config.head_dim, config.hidden, (config.kv_heads, config.groups)
    parts = np.array(block["qkv"]).reshape(-1, D, hidden)
    query, key, value = np.split(parts, [config.heads, config.heads + config.kv_heads])
    out = np.array(block["out"]).T.reshape(*per_head, D, hidden)
    return SMALL * query.reshape(*per_head, D, hidden), SMALL * key, value, SMALL * out


def _look_back(config: ModelConfig, query, key, value, out, own, moved) -> None:
    """The first KV head attends to the token before, and writes what `own` reads of it to where `moved` reads.

    A query weight e^(−iθ) and a key weight 1 on the shared component give, once rotated, cos(θ (distance − 1)).
    """
    half = config.head_dim // 2
    angle = config.rope_base ** (-np.arange(FAST) / half)[:half]
    query[0, :, : len(angle), 0], query[0, :, half : half + len(angle), 0] = np.cos(angle), -np.sin(angle)
    key[0, : len(angle), 0] = 1
    value[0], out[0] = own, moved / config.groups


def _look_up(config: ModelConfig, query, key, value, out, own, moved, rng) -> None:
    """Every head attends to where its own token was moved to, and copies."""
    query += own
    key += moved
    for head in range(config.kv_heads):
        value[head] = _rows(rng, config)[0]
    out += value[:, None] / config.groups


def _rows(rng: np.random.Generator, config: ModelConfig):
    """Two sets of orthonormal rows `[D, hidden]`, apart where hidden allows it, that do not see the shared component."""
    free = config.hidden - 1
    square = np.linalg.qr(rng.standard_normal((max(free, config.head_dim),) * 2))[0]
    wide = np.pad(square[:, :free], ((0, 0), (1, 0)))
    return wide[: config.head_dim], wide[-config.head_dim :]
