"""A trained model as a folder that looks like a Hugging Face checkpoint and that `kvlab.models.load` reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvlab.models.config import ModelConfig
from kvlab.models.gguf import sha256


def export(folder: Path, config: ModelConfig, params: Any, words: list[str], origin: dict[str, Any]) -> None:
    """Writes config.json, tokenizer.json, model.safetensors (fp32) and source.json, beside the place and renamed.

    Args:
      words: the vocabulary, in the order of ids; a text is words between spaces.
      origin: where the weights come from; goes into source.json beside their digest.
    """
    from safetensors.numpy import save_file

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(tensors(config, params), part / "model.safetensors", {"format": "pt"})
    (part / "config.json").write_text(json.dumps(card(config), indent=1))
    tokenizer(words).save(str(part / "tokenizer.json"))
    source = {**origin, "model.safetensors": sha256(part / "model.safetensors")}
    (part / "source.json").write_text(json.dumps(source, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def tensors(config: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """Parameters under a checkpoint's usual names; q, k, v and gate, up are parted."""
    params = jax.tree.map(np.asarray, params)
    named = {"model.embed_tokens": params["embedding"], "model.norm": params["norm"]["scale"]}
    ends = np.cumsum([config.heads, config.kv_heads]) * config.head_dim
    for i, block in params["blocks"].items():
        inside = {
            "input_layernorm": block["attention_norm"]["scale"],
            "post_attention_layernorm": block["ffn_norm"]["scale"],
            "self_attn.o_proj": block["out"],
            "mlp.down_proj": block["down"],
        }
        inside |= zip((f"self_attn.{x}_proj" for x in "qkv"), np.split(block["qkv"], ends))
        inside |= zip(("mlp.gate_proj", "mlp.up_proj"), np.split(block["gate_up"], 2))
        named |= {f"model.layers.{i}.{name}": value for name, value in inside.items()}
    return {f"{name}.weight": np.ascontiguousarray(value) for name, value in named.items()}


def card(config: ModelConfig) -> dict[str, Any]:
    """The shape under the names of a Hugging Face config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": True,
    }


def tokenizer(words: list[str]):
    """Words between spaces, an id each; any other word is an error."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=""))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made
