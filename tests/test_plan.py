"""The planner: figures known by hand, the caches that a session really has, XLA's account, what fits and what does not."""

import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import cli, memory, parts
from kvlab.codec import Int8, Raw
from kvlab.core import Selection, part
from kvlab.decode import Engine
from kvlab.errors import CapacityError, ConfigError, KvlabError, RefusedPolicy
from kvlab.experiment.config import read_policies
from kvlab.layout import Contiguous, PageMajor
from kvlab.plan import Dims, most, plan, room, table, workspace
from kvlab.plan.inputs import parse_bytes, read_dims
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Window
from kvlab.selection import ReadAll
from tests import tools


@part
class Means(Selection):
    """Reads everything and keeps a mean key per page: a selection with state."""

    reads_all = True

    def start(self, key, pos):
        return key.mean(3)


@part
class Numbered(Contiguous):
    """A layout that holds a table beside the codes."""

    def pack(self, code, held=None):
        return {"codes": super().pack(code, held), "table": jnp.zeros(code["k"]["x"].shape[:3], jnp.int32)}


WHOLE = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())
POLICIES = {
    "full": WHOLE,
    "float16": Policy(KeepAll(), Raw("float16"), Contiguous(), ReadAll()),
    "int8": Policy(Window(70, 4), Int8(), Contiguous(), ReadAll()),
    "tailed": Policy(Window(70, 4), Int8("channel"), Contiguous(), ReadAll()),
    "scores": Policy(tools.KeyNorm(), Raw(), Contiguous(), ReadAll()),
    "index": Policy(KeepAll(), Raw(), Contiguous(), Means()),
    "paged": Policy(KeepAll(), Int8("channel"), PageMajor(), ReadAll()),
}
BIG = read_dims("layers=48,kv_heads=8,head_dim=128")
HALF = (POLICIES["float16"],) * 48


def tiny(**changes):
    return Dims.of(tools.tiny_model(**changes).config)


def kvlab(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["kvlab", *args])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_figures_known_by_hand():
    got = plan(BIG, HALF, 8, 131_072)
    assert got.total("cache") == 206_158_430_208
    assert got.total("metadata") == 48 * 8 * 8 * (131_072 * 4 + 3 * 4)
    llama = plan(read_dims("layers=32,kv_heads=8,head_dim=128"), HALF[:32], 1, 8192)
    assert llama.total("cache") == 131_072 * 8192


def test_the_command(monkeypatch, tmp_path, capsys):
    dims, file = "layers=48,kv_heads=8,head_dim=128", tmp_path / "p.json"
    args = ("--dims", dims, "--batch", "8", "--length", "131072", "--dtype", "float16", "--json", str(file))
    assert not kvlab(monkeypatch, "plan", *args)
    got = json.loads(file.read_text())
    assert got["cache_bytes"] == 206_158_430_208 and got["fits"] is None and got["weights_bytes"] == 0
    levels = ("cache_bytes", "metadata_bytes", "index_bytes", "state_bytes")
    assert got["resident_bytes"] == sum(got[k] for k in levels) == sum(x["resident_bytes"] for x in got["layers"])
    shown = capsys.readouterr().out
    assert "206,158,430,208" in shown and "48 layers × 8 rows × 8 heads × 2,048 pages" in shown and "unknown" in shown


@pytest.fixture(scope="module")
def engine():
    return Engine(tools.tiny_model())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("names", [*([n] * 2 for n in POLICIES), ["tailed", "full"]], ids="-".join)
def test_resident_is_what_a_session_holds(engine, names, rows):
    """CASES 8 and 17: to the byte and layer by layer, also where layers differ and parts have state of their own."""
    policies, new = [POLICIES[n] for n in names], 9
    ids = np.random.default_rng(0).integers(0, 256, (rows, 150)).tolist()
    session = engine.start(engine.prefill(ids), policies, new)
    got = plan(Dims.of(engine.config), policies, rows, 150, new)
    caches = session.state.caches
    assert [x.resident for x in got.layers] == [memory.resident(c) for c in caches]
    assert got.total("resident") == rows * memory.footprint(policies, caches, WHOLE, 150 + new).resident_bytes
    assert [x.index for x in got.layers] == [memory.resident(c.index) for c in caches]
    assert [x.state for x in got.layers] == [memory.resident(c.retained) for c in caches]
    assert got.weights == memory.resident(engine.model.params) and got.workspace.records > 0


def test_a_layouts_own_arrays_are_state():
    policy = Policy(KeepAll(), Raw(), Numbered(), ReadAll())
    got = plan(tiny(), (policy,) * 2, 3, 200)
    assert got.total("state") == 2 * 3 * 2 * 4 * 4 and got.total("cache") == memory.kv_bytes(3, 256, 2, 2, 16, 4)


def test_every_formula_gives_its_figure():
    """What the table says about a figure, worked out, is that figure."""
    policies = (POLICIES["tailed"], WHOLE)
    got = plan(tiny(), policies, 3, 600, 50, memory=10**9)
    checked = {name.strip(): (value, how) for name, value, how in table.explain(got)}
    for name in ("weights", "cache", "metadata", "records", "prefill", "decode"):
        value, how = checked[name]
        text = re.sub(r"(?<=\d),(?=\d{3})", "", how).replace("×", "*")
        text = re.sub(r"\b(?!max\b)[A-Za-z][A-Za-z-]*", "", text)
        assert eval(text) == value > 0, (name, how)


@pytest.mark.parametrize("name,rows,length", [("full", 1, 64), ("tailed", 3, 200), ("full", 3, 1024), ("tailed", 1, 1024)])
def test_the_estimate_is_within_a_factor_of_two_of_xla(name, rows, length):
    policies = (POLICIES[name],) * 2
    guess, true = (plan(tiny(), policies, rows, length, exact=exact).workspace for exact in (False, True))
    assert guess.source == "estimate" and true.source == "XLA"
    for figure in ("bytes", "records", "prefill", "decode"):
        assert 0.5 <= getattr(guess, figure) / getattr(true, figure) <= 2, figure


def test_the_estimate_holds_for_deeper_and_wider_models():
    dims = tiny(layers=6, hidden=96, heads=4)
    guess, true = (plan(dims, (WHOLE,) * 6, 2, 512, exact=exact).workspace for exact in (False, True))
    assert 0.5 <= guess.prefill / true.prefill <= 2 and 0.5 <= guess.bytes / true.bytes <= 2


@pytest.mark.parametrize("name", ["full", "tailed"])
def test_more_takes_more(name):
    policies = (POLICIES[name],) * 2
    need = lambda rows, length, new=0: plan(tiny(), policies, rows, length, new).need
    by_rows = [need(n, 300) for n in (1, 2, 3, 8, 50)]
    by_length = [need(2, n) for n in (1, 63, 64, 65, 128, 129, 500, 1000, 1024)]
    assert by_rows == sorted(set(by_rows)) and by_length == sorted(by_length) and by_length[0] < by_length[-1]
    assert need(2, 300, 700) >= need(2, 300)


@pytest.mark.parametrize("exact", [False, True])
def test_the_largest_batch_and_the_longest_context_just_fit(exact):
    policies, size = (WHOLE,) * 2, 60_000_000
    got = plan(tiny(context=100_000), policies, 2, 500, 20, memory=size, exact=exact)
    scale = got.workspace.bytes / plan(tiny(), policies, 2, 500, 20).workspace.bytes

    def need(rows, length):
        there = plan(tiny(context=100_000), policies, rows, length, 20)
        return there.need + (scale - 1) * there.workspace.bytes

    assert got.fits and got.slack == 6_000_000 and room(size) == 54_000_000
    assert got.largest_batch > 2 and 520 < got.longest_context < 100_000
    assert need(got.largest_batch, 500) <= room(size) < need(got.largest_batch + 1, 500)
    assert need(2, got.longest_context - 20) <= room(size) < need(2, got.longest_context - 19)


def test_the_answers_agree_with_fits():
    need = plan(tiny(), (WHOLE,) * 2, 4, 300).need
    for left, fits in ((0, True), (-1, False)):
        size = next(n for n in range(need, 2 * need) if room(n) == need + left)
        got = plan(tiny(), (WHOLE,) * 2, 4, 300, memory=size)
        assert got.fits is fits and (got.largest_batch >= 4) is fits


def test_bounds_of_the_answers():
    policies = (WHOLE,) * 2
    assert plan(tiny(), policies, 1, 100, memory=10**12).longest_context == 1024
    nothing = plan(tiny(), policies, 1, 100, memory=1000)
    assert (nothing.fits, nothing.largest_batch, nothing.longest_context) == (False, 0, 0)
    with pytest.raises(CapacityError, match="1024"):
        plan(tiny(), policies, 1, 1000, 25)


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 1000])
@pytest.mark.parametrize("edge", [0, 1, 2, 7, 8, 999, 1000])
def test_most(edge, limit):
    assert most(lambda n: n <= edge, limit) == min(edge, limit)


def test_weights_of_dims():
    dims = "layers=2,kv_heads=2,head_dim=16,heads=6,hidden=48,ffn=96,vocab=256"
    model = tools.tiny_model()
    assert plan(read_dims(dims), (WHOLE,) * 2, 1, 64).weights == memory.resident(model.params)
    assert workspace.weights(model.config)["embedding"].shape == (256, 48)


@pytest.mark.parametrize(
    "text,size",
    [
        ("24GB", 24 * 10**9),
        ("24 GiB", 24 << 30),
        ("1.5MB", 1_500_000),
        ("512kib", 512 << 10),
        ("7", 7),
        ("80B", 80),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "24XB", "-1GB", "0", "0.1", "1e9", "twelve"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="memory size"):
        parse_bytes(text)


@pytest.mark.parametrize("head", ["", "[policy]\n"])
def test_a_policy_file(tmp_path, head):
    file = tmp_path / "p.toml"
    file.write_text(head + 'retention = { name = "window", size = 60 }\ncodec = "int8"\n')
    assert parts.policy(parts.read_policy(file)) == Policy(Window(60, 4), Int8(), Contiguous(), ReadAll())
    label, made = read_policies([str(file), "retention.size=90", "codec.scale=channel"], None, Dims(2, 2, 16).bare())
    assert made[1] == Policy(Window(90, 4), Int8("channel"), Contiguous(), ReadAll()) and "90" in label


def test_layers_of_a_policy_file(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text('layers = [{ range = [1, 2], policy = { codec = "int8" } }]\n[policy]\nretention = "window"\n')
    _, made = read_policies([str(file)], None, Dims(4, 2, 16).bare())
    assert [type(p.codec).__name__ for p in made] == ["Raw", "Int8", "Int8", "Raw"]
    assert {type(p.retention).__name__ for p in made} == {"Window"}
    with pytest.raises(ConfigError, match="one policy serves all layers"):
        parts.read_policy(file)
    with pytest.raises(ConfigError, match="range"):
        read_policies([str(file)], None, Dims(2, 2, 16).bare())


@pytest.mark.parametrize(
    "text,message",
    [
        ("codec = ", "no valid TOML"),
        ('codex = "int8"', "did you mean 'codec'"),
        ('[policy]\ncodec = "int9"', "did you mean 'int8'"),
        ('codec = "raw"\n[policy]', "codec; allowed"),
        ("policy = 3", "policy; allowed"),
        ("layers = 3", "layers; allowed"),
        ('retention = { name = "tests.tools:KeyNorm" }\ncodec = { name = "int8", scale = "channel" }', "replaces single tokens"),
    ],
)
def test_policy_files_that_are_wrong(tmp_path, text, message):
    file = tmp_path / "p.toml"
    file.write_text(text)
    with pytest.raises((ConfigError, RefusedPolicy), match=re.escape(message)):
        parts.read_policy(file)
    with pytest.raises(KvlabError, match="No such file"):
        parts.read_policy(tmp_path / "missing.toml")


def test_a_named_model(monkeypatch, tmp_path):
    file = tmp_path / "p.json"
    assert not kvlab(monkeypatch, "plan", "--model", "smollm2-135m", "--memory", "24GB", "--json", str(file))
    got = json.loads(file.read_text())
    assert got["weights_bytes"] == 4 * 134_515_008 and len(got["layers"]) == 30 and got["length"] == 8192
    assert got["fits"] and got["largest_batch"] >= 8 and got["longest_context"] == 8192
    assert got["cache_bytes"] == memory.kv_bytes(8, 8192, 30, 3, 64, 4)


DIMS = ("--dims", "layers=2,kv_heads=2,head_dim=16")


@pytest.mark.parametrize(
    "args,message",
    [
        (("--dims", "layers=2,kv_head=2"), "did you mean 'kv_heads'"),
        (("--dims", "layers=2,head_dim=8"), "kv_heads missing"),
        (("--dims", "layers=2,layers=2"), "given twice"),
        (("--dims", "layers=0"), "at least 1"),
        (("--dims", "layers=two"), "at least 1"),
        (("--dims", "layers=2,kv_heads=2,head_dim=16,heads=5"), "no multiple"),
        ((), "give one of"),
        ((*DIMS, "--model", "smollm2-135m"), "give one of"),
        (("--model", "smolm2-135m"), "did you mean 'smollm2-135m'"),
        ((*DIMS, "--batch", "0"), "--batch=0"),
        ((*DIMS, "--length", "-4"), "--length=-4"),
        ((*DIMS, "--new-tokens", "-1"), "--new-tokens=-1"),
        ((*DIMS, "--memory", "24XB"), "memory size '24XB'"),
        ((*DIMS, "--dtype", "float61"), "did you mean 'float16'"),
        ((*DIMS, "--dtype", "float16", "--policy", "codec=int8"), "both given"),
        ((*DIMS, "--policy", "int8"), "codec=int8"),
        ((*DIMS, "--policy", "missing.toml"), "No such file"),
        (
            (*DIMS, "--policy", "retention=tests.tools:KeyNorm", "--policy", "codec={name='int8',scale='channel'}"),
            "single tokens",
        ),
        ((*DIMS, "--exact"), "--exact compiles"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, args, message):
    assert kvlab(monkeypatch, "plan", *args) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]
