"""Families as configurations of one transformer: parity with transformers, loading from folders and from the hub."""

import dataclasses
import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kvlab import memory, models, parts
from kvlab.core import PAGE
from kvlab.decode import Engine, per_layer
from kvlab.errors import ConfigError, ModelError
from kvlab.experiment.config import Cell
from kvlab.models import families
from kvlab.models.config import Rope
from kvlab.retention import KeepAll, Window
from kvlab.tasks.needle import Needle
from tests import tools

FOLDER = Path(__file__).parent / "data" / "families"
NAMES = ("llama3", "smollm2", "qwen2", "qwen3", "mistral", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A writable copy."""
    return Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("families") / "all"))


@pytest.fixture
def copy(tmp_path):
    """A family's folder to damage."""
    return lambda name: Path(shutil.copytree(FOLDER / name, tmp_path / name))


def edit(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_equal_transformers(name):
    """Logits ≤ 1e-4 and 64 of 64 greedy tokens, on prompts longer than the local window and shorter, decoded together."""
    golden = np.load(FOLDER / name / "golden.npz")
    engine = Engine(models.load(str(FOLDER / name)))
    prompt = engine.prefill([golden[f"prompt_{i}"].tolist() for i in range(3)])
    session = engine.start(prompt, parts.policy({}), 64)
    session.run(63)
    for i in range(3):
        np.testing.assert_allclose(prompt.logits_BV[i], golden[f"logits_{i}"], atol=1e-4)
        assert session.tokens[i].tolist() == golden[f"tokens_{i}"].tolist()


def test_parts_of_a_family_exist_only_where_the_config_asks():
    leaves = {name: set(models.load(str(FOLDER / name)).params["blocks"][0]) for name in NAMES}
    plain = {"attention_norm", "qkv", "out", "ffn_norm", "gate_up", "down"}
    assert leaves["llama3"] == leaves["smollm2"] == leaves["mistral"] == plain
    assert leaves["qwen2"] - plain == {"qkv_bias"} and leaves["qwen3"] - plain == {"query_norm", "key_norm"}
    assert leaves["gemma3"] - plain == {"query_norm", "key_norm", "attention_post_norm", "ffn_post_norm"}


def test_rotary_tables_are_made_once_per_base():
    model = models.load(str(FOLDER / "gemma3"))
    from kvlab.models.transformer import bind

    turns = bind(model.config, model.params).rotary(jnp.arange(3)[None])
    assert set(turns) == {Rope(1e4), Rope(1e6)}


# ------------------------------------------------------------------------------------------------------------- configs

GEMMA_4B = {
    "model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 16,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
LLAMA = {k: v for k, v in GEMMA_4B.items() if not k.startswith(("rope", "query", "sliding"))} | {"model_type": "llama"}


def test_gemma_has_a_global_layer_after_five_local_ones():
    config = families.to_config(GEMMA_4B)
    assert config.windows == ((512,) * 5 + (None,)) * 2
    assert config.rope(0) == Rope(1e4) and config.rope(5).base == 1e6 and config.rope(5).scaling.factor == 8
    assert config.attention(0).scale == 0.25 and config.embedding_scale == 8 and config.tied


def test_qwen_is_local_from_max_window_layers_on():
    table = LLAMA | {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 9}
    assert families.to_config(table).windows == ()
    assert families.to_config(table | {"use_sliding_window": True}).windows == (None,) * 9 + (64,) * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is unknown; allowed: gemma3_text, llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is unknown; allowed: gelu_pytorch_tanh, silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is unknown; allowed: default, linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"attention_bias": True}, "attention_bias = True means something that kvlab's 'llama' does not do"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"model_type": "gemma3_text", "layer_types": ["linear_attention"] * 12}, "'linear_attention'.*allowed: full_attention"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8}, "names 1 layers of 12"),
    ],
)
def test_what_a_family_does_not_do_is_named(changes, message):
    with pytest.raises(ModelError, match=message):
        families.to_config(LLAMA | changes)


# ------------------------------------------------------------------------------------------------------------- folders


def tensors(folder: Path) -> dict:
    assert ml_dtypes.bfloat16
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def shard(folder: Path) -> Path:
    """The same folder, its weights in two shards."""
    names = sorted(found := tensors(folder))
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: found[name] for name in some}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return folder


def assert_same(a, b):
    assert set(a) == set(b)
    for key in a:
        if isinstance(a[key], dict):
            assert_same(a[key], b[key])
        else:
            assert a[key].dtype == jnp.float32
            np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shards_and_stored_types_give_the_same_parameters(copy, dtype):
    folder = copy("qwen2")
    plain = models.load(str(folder))
    rounded = {name: x.astype(np.float16) for name, x in tensors(folder).items()}  # bf16 weights near 1 fit float16
    save_file({name: x.astype(dtype) for name, x in rounded.items()}, folder / "model.safetensors")
    whole = models.load(str(folder))
    other = models.load(str(shard(folder)))
    assert_same(whole.params, other.params)
    assert len({plain.digest, whole.digest, other.digest}) == 3
    np.testing.assert_allclose(whole.params["embedding"], plain.params["embedding"], atol=1e-3)


def test_damaged_folders_are_refused(copy):
    folder = shard(copy("llama3"))
    second = folder / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-100])
    with pytest.raises(ModelError, match="00002-of-00002.safetensors is truncated or corrupt"):
        models.load(str(folder))
    second.unlink()
    with pytest.raises(ModelError, match="lacks model-00002-of-00002.safetensors of its index"):
        models.load(str(folder))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="only safetensors files are read"):
        models.load(str(folder))


def test_weights_that_the_config_does_not_describe_are_refused(copy):
    folder = copy("smollm2")
    with pytest.raises(ModelError, match="no tensor 'model.layers.2"):
        models.load(str(edit(folder, num_hidden_layers=3)))
    with pytest.raises(ModelError, match="does not call for: model.layers.1"):
        models.load(str(edit(folder, num_hidden_layers=1)))
    with pytest.raises(ModelError, match="has shape .* config.json asks for"):
        models.load(str(edit(folder, num_hidden_layers=2, intermediate_size=64)))


def test_bos_stands_once_before_a_prompt(copy):
    folder = copy("smollm2")
    about = folder / "tokenizer_config.json"
    assert models.load(str(folder)).tokenizer.bos is None
    about.write_text(json.dumps({"add_bos_token": True, "bos_token": {"content": "!"}}))
    tokenizer = models.load(str(folder)).tokenizer
    assert tokenizer.prompt("ab") == tokenizer.begin + tokenizer.encode("ab") and len(tokenizer.encode("ab")) == 2
    batch = Needle(length=200, needles=2, contexts=1).batch(0, 0, tokenizer)
    assert [len(p) for p in batch.prompts] == [200] and batch.prompts[0][0] == tokenizer.bos
    assert batch.prompts[0].count(tokenizer.bos) == 1 and all(tokenizer.bos not in f for f in batch.forced)
    about.write_text(json.dumps({"add_bos_token": True, "bos_token": "<s>"}))
    with pytest.raises(ModelError, match="'<s>' is none of the tokenizer's tokens"):
        models.load(str(folder))


def test_bos_is_found_in_the_post_processor(copy):
    from tokenizers import Tokenizer, processors

    folder = copy("smollm2")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(single="! $A", special_tokens=[("!", library.token_to_id("!"))])
    library.save(str(folder / "tokenizer.json"))
    assert models.load(str(folder)).tokenizer.begin == [library.token_to_id("!")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert models.load(str(folder)).tokenizer.begin == []


# ------------------------------------------------------------------------------------------------------------- the hub


class Hub(SimpleHTTPRequestHandler):
    """As much of the hub's protocol as a download takes: a listing, and files with their commit and tag."""

    COMMIT = "c0ffee" + "0" * 34

    def __init__(self, folder, asked, *args):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        name = path.rpartition(f"/resolve/{self.COMMIT}/")[2]
        if path.startswith("/api/models/org/tiny"):
            names = sorted(p.name for p in self.folder.iterdir())
            if "/tree/" in path:
                body = json.dumps(
                    [{"type": "file", "path": n, "size": (self.folder / n).stat().st_size, "oid": "0" * 40} for n in names]
                )
            else:
                body = json.dumps({"id": "org/tiny", "sha": self.COMMIT, "siblings": [{"rfilename": n} for n in names]})
            self.answer(200, body.encode())
        elif path.startswith("/org/tiny/resolve/") and (self.folder / name).is_file():
            self.answer(200, (self.folder / name).read_bytes())
        else:
            self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})

    def answer(self, code, body, **more):
        self.send_response(code)
        headers = {"Content-Length": str(len(body)), "ETag": f'"{len(body):040d}"', "X-Repo-Commit": self.COMMIT, **more}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(copy, tmp_path, monkeypatch):
    """A local hub with one repository, pickles included, and what was asked of it."""
    folder, asked = shard(copy("gemma3")), []
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield server, folder, asked
    server.shutdown()
    server.server_close()


def test_a_hub_model_is_fetched_once_and_found_offline(hub, monkeypatch):
    server, folder, asked = hub
    model = models.load("hf:org/tiny")
    assert_same(model.params, models.load(str(folder)).params)
    assert any("safetensors" in path for path in asked) and not any(path.endswith(".bin") for path in asked)
    before = len(asked)
    assert models.load("hf:org/tiny").digest == model.digest and len(asked) == before
    with pytest.raises(ModelError, match="hf:org/other could not be fetched"):
        models.load("hf:org/other")


def test_no_hub_and_nothing_cached_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="hf:org/tiny could not be fetched .* is not in"):
        models.load("hf:org/tiny")


# -------------------------------------------------------------------------------------------------------- local layers


@pytest.mark.parametrize(
    ("table", "extra"),
    [({}, 0), ({"retention": {"name": "window", "size": 900}}, 0), ({"codec": {"name": "int8", "scale": "channel"}}, PAGE)],
    ids=["full", "window", "int8"],
)
def test_local_layers_hold_their_window_and_at_most_a_page(table, extra):
    """By bytes: what 512 tokens (and one page, where pages are evicted) take, whatever the policy is elsewhere."""
    windows = (512, 512, None)
    engine = Engine(tools.tiny_model(layers=3, windows=windows, context=2048))
    policy = parts.policy(table)
    session = engine.start(engine.prefill([np.random.default_rng(0).integers(0, 256, 1100).tolist()]), policy, 84)
    session.run(84)
    config, total = engine.config, 1216
    for layer, window in enumerate(windows):
        budget = policy.budget(1100, total) if window is None else 512 + extra
        kept = session.policies[layer]
        want = memory.expected(kept, 1, config.kv_heads, config.head_dim, budget)
        assert memory.resident(session.state.caches[layer]) == want
        assert kept.codec == policy.codec and kept.layout == policy.layout
    assert session.policies[2] == policy


def test_a_cell_and_the_engine_agree_on_local_layers_and_layers_overrides_them():
    config = dataclasses.replace(tools.tiny_model().config, layers=4, windows=(32, None, 32, None))
    table = {"codec": {"name": "int8"}}
    cell = Cell(model={"name": "x"}, task={"name": "needle"}, policy=table)
    assert cell.make_policies(config) == per_layer(parts.policy(table), config)
    assert [p.retention for p in cell.make_policies(config)] == [Window(32, 0), KeepAll(), Window(32, 0), KeepAll()]
    named = Cell.__struct_fields__ and parts.policy({**table, "retention": {"name": "keep_all"}})
    from kvlab.experiment.config import LayerOverride

    other = Cell(model={}, task={}, policy=table, layers=(LayerOverride((0, 0), {"retention": {"name": "keep_all"}}),))
    assert other.make_policies(config)[0] == named and other.make_policies(config)[2].retention == Window(32, 0)
    with pytest.raises(ConfigError, match="2 policies for a model of 4 layers"):
        per_layer([named] * 2, config)
