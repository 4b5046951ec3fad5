"""Models: a configuration, a pytree of parameters and a tokenizer."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from kvlab.errors import ModelError
from kvlab.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
      params: a pure dict of fp32 arrays, as `kvlab.models.transformer.bind` takes it.
      digest: sha256 of the weights file.
      stops: token ids that end a text.
    """

    name: str
    config: ModelConfig
    params: Any
    tokenizer: Any
    digest: str
    stops: tuple[int, ...] = ()


def load(name: str) -> Model:
    """A model by name (fetched on first use), by folder or by .gguf file. Errors: ModelError."""
    from kvlab.models import fetch
    from kvlab.models.gguf import sha256
    from kvlab.models.tokenizer import Tokenizer

    folder = fetch.find(name)
    raw = _json(folder / "config.json")
    weights = folder / "model.safetensors"
    if not weights.exists():
        raise ModelError(f"{folder} has no model.safetensors; run: kvlab fetch {name} --again")
    digest, known = sha256(weights), _json(folder / "source.json").get("model.safetensors")
    if digest != known:
        raise ModelError(f"{weights} is truncated or corrupt (its digest is another); run: kvlab fetch {name} --again")
    config = _config(raw)
    stops = tuple(dict.fromkeys(i for i in (raw.get("eos_token_id"),) if i is not None))
    return Model(name, config, _params(weights, config), Tokenizer(folder / "tokenizer.json"), digest, stops)


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); run: kvlab fetch NAME --again") from error


def _config(raw: dict) -> ModelConfig:
    return ModelConfig(
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        ffn=raw["intermediate_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        vocab=raw["vocab_size"],
        context=raw["max_position_embeddings"],
        rope_base=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def _params(weights: Path, config: ModelConfig) -> dict:
    """Parameters from a memory-mapped file under a checkpoint's usual names; q, k, v and gate, up are joined."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors import SafetensorError, safe_open

    def block(get, i):
        tensor = lambda name: get(f"model.layers.{i}.{name}.weight")
        join = lambda kind, names: jnp.asarray(np.concatenate([tensor(f"{kind}.{n}_proj") for n in names]))
        return {
            "attention_norm": {"scale": jnp.asarray(tensor("input_layernorm"))},
            "qkv": join("self_attn", "qkv"),
            "out": join("self_attn", "o"),
            "ffn_norm": {"scale": jnp.asarray(tensor("post_attention_layernorm"))},
            "gate_up": join("mlp", ("gate", "up")),
            "down": join("mlp", ("down",)),
        }

    try:
        with safe_open(weights, framework="numpy") as file:
            return {
                "embedding": jnp.asarray(file.get_tensor("model.embed_tokens.weight")),
                "blocks": {i: block(file.get_tensor, i) for i in range(config.layers)},
                "norm": {"scale": jnp.asarray(file.get_tensor("model.norm.weight"))},
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{weights} cannot be read ({error})") from error
