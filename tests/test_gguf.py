"""A family's checkpoint written as GGUF, as llama.cpp writes it, gives the same parameters back."""

import json
from pathlib import Path

import gguf as library
import numpy as np
import pytest

from kvlab import models
from kvlab.models import gguf
from tests.test_families import FOLDER, assert_same, tensors


def permute(weight, heads: int):
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(path: Path, folder: Path, kind: str) -> None:
    raw, found = json.loads((folder / "config.json").read_text()), tensors(folder)
    writer = library.GGUFWriter(path, kind)
    writer.add_block_count(raw["num_hidden_layers"]), writer.add_context_length(512)
    writer.add_embedding_length(raw["hidden_size"]), writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"]), writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(1e4), writer.add_sliding_window(24)
    writer.add_key_length(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("qwen2"), writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([1] * len(vocab)), writer.add_eos_token_id(0)
    inside = {there: here for here, there in gguf.FAMILIES[kind][1].items()}
    top = {there: here for here, there in gguf.TOP.items()}
    for name, value in found.items():
        value = value.astype(np.float32) + np.float32(kind == "gemma3" and name.endswith("norm.weight"))
        if name not in top:
            _, _, layer, *middle, leaf = name.split(".")
            part = inside[".".join(middle)]
            if kind == "llama" and part in ("attn_q", "attn_k"):
                value = permute(value, raw["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
        writer.add_tensor(top.get(name) or f"blk.{layer}.{part}.{leaf}", np.ascontiguousarray(value))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


@pytest.mark.parametrize(("kind", "name"), [("llama", "smollm2"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3")])
def test_a_family_comes_back_from_gguf(tmp_path, monkeypatch, kind, name):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "model.gguf", FOLDER / name, kind)
    got, want = models.load(str(tmp_path / "model.gguf")), models.load(str(FOLDER / name))
    close = lambda a: {k: close(v) if isinstance(v, dict) else np.round(v, 5) + np.float32(0) for k, v in a.items()}
    assert set(got.params["blocks"][0]) == set(want.params["blocks"][0])
    assert_same(close(got.params), close(want.params))
