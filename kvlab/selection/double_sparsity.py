"""Scores from a few channels."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvlab.codec import Raw
from kvlab.core import PAGE, part, static
from kvlab.errors import ConfigError
from kvlab.gates.spatial import match
from kvlab.selection.top import Top

STORE = Raw("float16")


@part
class DoubleSparsity(Top):
    """Reads what the heaviest channels of keys and queries score highest: Double Sparsity, https://arxiv.org/abs/2408.07092,
    sections 3.1 and 3.2.

        score(q, k) = Σ over the chosen channels c of q_c · k_c        the mean over the query heads of a KV head

    The chosen channels of every key lie beside the cache in 16 bits and count in its bytes. Without a calibration they are,
    for each row and KV head, those of largest mean |k_c| over the prompt as it was filled (after its rotary embedding, ties
    to the lower channel), and stay the same while decoding; queries have no say, and a prompt cannot be streamed.

    Fields, besides those of `Top`:
      channels: how many of the head's.
      calibration: a file that `save` wrote, which names the channels of each layer and KV head as the article picks them.
    Errors: ConfigError for more channels than a head has, or a file for another model or number of channels.
    """

    channels: int = static(default=16)
    calibration: str = static(default="")
    chosen: Any = None  # [H, C] or [B, H, C]

    def __post_init__(self):
        super().__post_init__()
        if self.channels < 1:
            raise ConfigError(f"double_sparsity: channels={self.channels}; allowed: 1 … head_dim")

    @property
    def from_prompt(self):
        return not self.calibration and self.chosen is None

    def at(self, layer, model, token_bytes):
        made = super().at(layer, model, token_bytes)
        if not self.calibration or self.chosen is not None:
            return made
        chosen = load(self.calibration, self.channels, model)[layer]
        return dataclasses.replace(made, chosen=jnp.asarray(chosen, jnp.int32))

    def index_bytes(self, dim):
        return STORE.page_bytes(self.channels) / PAGE

    def start(self, key_BHNPD, pos_BHNP):
        B, H, N, P, D = key_BHNPD.shape
        if self.channels > D:
            raise ConfigError(f"double_sparsity: channels={self.channels}; allowed: 1 … {D} (head_dim)")
        chosen = self.chosen
        if chosen is None:
            chosen = heaviest(jnp.abs(key_BHNPD).sum((2, 3)), self.channels)
        chosen = jnp.broadcast_to(chosen, (B, H, self.channels))
        index = jnp.take_along_axis(key_BHNPD.reshape(B, H, N * P, D), chosen[:, :, None], -1)
        return chosen, STORE.encode(jnp.swapaxes(index, 2, 3))["x"]

    def write(self, state, page, offset, key_BHD, pos_B, fresh):
        chosen, index = state
        new = STORE.encode(jnp.take_along_axis(key_BHD, chosen, -1))["x"]
        row, head = jnp.indices(page.shape, sparse=True)
        return chosen, index.at[row, head, :, page * PAGE + offset].set(new, mode="drop")

    def scores(self, state, query_BHQD, visible_BHNP, cache, around):
        chosen, index = state
        query = jnp.take_along_axis(query_BHQD.mean(2), chosen, -1)
        widen = lambda stored: STORE.decode({"x": stored})
        return match(query, jnp.swapaxes(index, 2, 3), widen).reshape(visible_BHNP.shape)


def heaviest(weight_XD, channels: int):
    """The channels of largest weight, ascending, `[..., C]`; among equals the lower ones."""
    return jnp.sort(lax.top_k(weight_XD, channels)[1].astype(jnp.int32), -1)


def calibrate(records, channels: int = 16) -> list[list[list[int]]]:
    """The channels of each layer and KV head that weigh most in the logits of some prompts.

        weight(c) = mean over queries and keys of |q_c · k_c| = mean |q_c| · mean |k_c|

    `records` are those of `Engine.prefill(prompts, {"queries"})`: every key, and the last queries of each prompt. The article
    takes the same outliers from a calibration set of text (section 3.1).
    """
    found = []
    for record in records:
        live = (record.pos_BT >= 0)[:, None, :, None]
        key = jnp.where(live, jnp.abs(record.key_BHTD), 0.0).sum((0, 2))
        found.append(heaviest(key * jnp.abs(record.seen["queries"]).sum((0, 2, 3)), channels).tolist())
    return found


def save(chosen: list[list[list[int]]], path: Path) -> None:
    """Writes what `calibrate` found as a JSON file."""
    path.write_text(json.dumps({"channels": chosen}), encoding="utf-8")


def find(path: str) -> Path:
    return Path(path).expanduser()


def load(path: str, channels: int, model) -> list[list[list[int]]]:
    """Channels by layer and KV head, as `save` wrote them. Errors: ConfigError."""
    try:
        found = json.loads(find(path).read_text(encoding="utf-8"))["channels"]
        shape = [[sorted({c for c in head if 0 <= c < model.head_dim}) for head in layer] for layer in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"calibration={path!r} is no file of channels ({error!r}); write one with double_sparsity.save"
        ) from error
    if [[len(head) for head in layer] for layer in shape] != [[channels] * model.kv_heads] * model.layers:
        raise ConfigError(
            f"calibration={path!r} does not name {channels} channels of {model.head_dim} for {model.layers} layers of "
            f"{model.kv_heads} KV heads; calibrate on this model, with channels={channels}"
        )
    return shape
