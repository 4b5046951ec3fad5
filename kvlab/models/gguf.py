"""Reading a GGUF file once, into a folder that looks like a Hugging Face checkpoint.

The folder holds config.json, tokenizer.json, tokenizer_config.json, model.safetensors (fp32, the usual names) and
source.json with digests. It is written beside its final place and renamed, so a folder that exists is complete.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvlab.errors import ModelError
from kvlab.models.checkpoint import sha256
from kvlab.models.config import Rope, RopeScaling

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# architecture → the config's model_type and the names of a block's tensors
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama", NAMES),
    "qwen2": ("qwen2", NAMES),
    "qwen3": ("qwen3", NAMES | QK_NORM),
    "gemma3": ("gemma3_text", NAMES | QK_NORM | SANDWICH),
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FREQUENCIES = "rope_freqs.weight"  # Llama 3's scaling, as a divisor for each frequency


def convert(source: Path, folder: Path, report=lambda done: None, beside: Mapping[str, bytes] | None = None) -> None:
    """Dequantises `source` into `folder`. Errors: ModelError.

    Args:
      report: gets the share done, 0 … 1.
      beside: further files of the folder by name, such as a licence.
    """
    from kvlab.models.tokenizer import from_gguf

    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, source, {t.name: t for t in reader.tensors})
    tensors = {}
    for i, tensor in enumerate(reader.tensors):
        if tensor.name != FREQUENCIES:
            name, value = _tensor(tensor, config, fields["general.architecture"])
            tensors[name] = value
        report((i + 1) / len(reader.tensors))
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _save(tensors, part / "model.safetensors")
    tokenizer, about = from_gguf(fields)
    tokenizer.save(str(part / "tokenizer.json"))
    digest = {"gguf": sha256(source), "model.safetensors": sha256(part / "model.safetensors")}
    for name, table in (("config", config), ("tokenizer_config", about), ("source", digest)):
        (part / f"{name}.json").write_text(json.dumps(table, indent=1))
    for name, content in (beside or {}).items():
        (part / name).write_bytes(content)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


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


def _config(fields: dict, source: Path, tensors: dict) -> dict:
    """The file's metadata under the names of a Hugging Face config.json."""
    kind = fields["general.architecture"]
    if kind not in FAMILIES:
        raise ModelError(f"{source} holds a {kind!r} model; allowed: {', '.join(sorted(FAMILIES))}")
    get = lambda key: fields[f"{kind}.{key}"]
    heads = get("attention.head_count")
    width = fields.get(f"{kind}.rope.dimension_count", get("embedding_length") // heads)
    config = {
        "model_type": FAMILIES[kind][0],
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": fields.get(f"{kind}.attention.key_length", width),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base"),
        "rms_norm_eps": float(np.float32(get("attention.layer_norm_rms_epsilon"))),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    if scaling := _scaling(fields, kind, config, tensors, source):
        config["rope_scaling"] = scaling
    return config | (_gemma3(fields, config) if kind == "gemma3" else {})


def _gemma3(fields: dict, config: dict) -> dict:
    """What Gemma 3 has besides; the pattern of local layers and their rotary base stand in no GGUF file."""
    # the 27B model alone scales by hidden / heads: https://arxiv.org/abs/2503.19786 and its reference code
    largest = config["num_hidden_layers"] == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"],
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 1e4,
    }


def _scaling(fields: dict, kind: str, config: dict, tensors: dict, source: Path) -> dict | None:
    name = fields.get(f"{kind}.rope.scaling.type", "none")
    if FREQUENCIES in tensors:
        return _llama3(np.asarray(tensors[FREQUENCIES].data, np.float32), config, source)
    if name == "linear":
        return {"rope_type": "linear", "factor": float(fields[f"{kind}.rope.scaling.factor"])}
    if name != "none":
        raise ModelError(f"{source}: rope scaling {name!r} is unknown; allowed: none, linear, or Llama 3's frequencies")
    return None


def _llama3(divisor, config: dict, source: Path) -> dict:
    """Llama 3's scaling as its config says it, recognised by what it does to the frequencies."""
    scaling = RopeScaling("llama3", float(divisor.max()))
    plain, base = (Rope(config["rope_theta"], s).frequencies(config["head_dim"]) for s in (None, scaling))
    if not np.allclose(plain / base, divisor, rtol=1e-3):
        raise ModelError(f"{source}: {FREQUENCIES} is not Llama 3's scaling; allowed: low 1, high 4, original 8192")
    names = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    original = {"original_max_position_embeddings": scaling.original}
    return {"rope_type": "llama3", "factor": scaling.factor, **names, **original}


def _tensor(tensor, config: dict, kind: str):
    """A tensor's usual name, and its values as a checkpoint has them: q and k unpermuted (Llama), norms less 1 (Gemma)."""
    import gguf

    value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if kind == "gemma3" and tensor.name.endswith("norm.weight"):
        value = value - np.float32(1)
    if tensor.name in TOP:
        return TOP[tensor.name], value
    try:
        _, layer, part, leaf = tensor.name.split(".")
        name = f"model.layers.{layer}.{FAMILIES[kind][1][part]}.{leaf}"
    except (ValueError, KeyError):
        raise ModelError(f"unknown tensor {tensor.name!r}; this file is no plain {kind} model") from None
    if kind == "llama" and part in ("attn_q", "attn_k"):
        value = _unpermute(value, config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
    return name, np.ascontiguousarray(value)


def _unpermute(weight, heads: int):
    """llama.cpp rotates pairs (2i, 2i+1), checkpoints rotate halves (i, i + d/2): reorder the rows of each head."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _save(tensors: dict, path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)
