"""Reading a GGUF file once, into a folder that looks like a Hugging Face checkpoint.

The folder holds config.json, tokenizer.json, model.safetensors (fp32, the usual names) and source.json with digests. It
is written beside its final place and renamed, so a folder that exists is complete.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from kvlab.errors import ModelError

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def convert(source: Path, folder: Path, report=lambda done: None) -> None:
    """Dequantises `source` into `folder`; `report` gets the share done, 0 … 1. Errors: ModelError."""
    from kvlab.models.tokenizer import from_gguf

    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, source)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {}
    for i, tensor in enumerate(reader.tensors):
        name, value = _tensor(tensor, config)
        tensors[name] = value
        report((i + 1) / len(reader.tensors))
    _save(tensors, part / "model.safetensors")
    (part / "config.json").write_text(json.dumps(config, indent=1))
    from_gguf(fields).save(str(part / "tokenizer.json"))
    digest = {"gguf": sha256(source), "model.safetensors": sha256(part / "model.safetensors")}
    (part / "source.json").write_text(json.dumps(digest, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def sha256(path: Path) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(source: Path):
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        end = max(int(t.data_offset) + int(t.n_bytes) for t in reader.tensors)
    except Exception as error:  # the reader raises whatever a broken header leads it to
        raise ModelError(f"{source} is no readable GGUF file ({error}); fetch it again") from error
    if end > source.stat().st_size:
        raise ModelError(f"{source} is truncated: {source.stat().st_size} bytes of {end}; fetch it again")
    return reader


def _config(fields: dict, source: Path) -> dict:
    """The file's metadata under the names of a Hugging Face config.json."""
    kind = fields["general.architecture"]
    if kind != "llama":
        raise ModelError(f"{source} holds a {kind!r} model; allowed: 'llama'")
    get = lambda key: fields[f"{kind}.{key}"]
    heads = get("attention.head_count")
    return {
        "model_type": kind,
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": fields.get(f"{kind}.rope.dimension_count", get("embedding_length") // heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base"),
        "rms_norm_eps": float(np.float32(get("attention.layer_norm_rms_epsilon"))),
        "tie_word_embeddings": True,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def _tensor(tensor, config: dict):
    import gguf

    value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if tensor.name in TOP:
        return TOP[tensor.name], value
    try:
        _, layer, kind, _ = tensor.name.split(".")
        name = f"model.layers.{layer}.{NAMES[kind]}.weight"
    except (ValueError, KeyError):
        raise ModelError(f"unknown tensor {tensor.name!r}; this file is no plain Llama model") from None
    if kind in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        value = _unpermute(value, heads)
    return name, np.ascontiguousarray(value)


def _unpermute(weight, heads: int):
    """llama.cpp rotates pairs (2i, 2i+1), checkpoints rotate halves (i, i + d/2): reorder the rows of each head."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _save(tensors: dict, path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)
