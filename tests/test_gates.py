"""Gates: parameters, scores against numpy, positions taken out, numbers at the edge, files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvlab import gates
from kvlab.attention import rotary, rotate
from kvlab.core import PAGE
from kvlab.errors import ConfigError
from kvlab.gates import GateConfig, GateParam
from kvlab.models.config import Rope
from kvlab.selection.gated import windowed
from tests import naive, tools

KINDS = ["spatial", "lightning"]


def vectors(seed=0, G=3, X=128, D=32, kv_heads=2):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    return normal(2, kv_heads, G, D), normal(2, kv_heads, X, D)


def scored(layer, query, key, pos=None, now=None, visible=None):
    B, H, X, _ = key.shape
    pos = jnp.arange(X)[None, None] if pos is None else pos
    now = jnp.full((B, H), X) if now is None else now
    visible = jnp.ones((B, H, X), bool) if visible is None else visible
    return layer.scores(jnp.asarray(query), layer.index(jnp.asarray(key), pos), visible, now)


@pytest.mark.parametrize("shape,total", [((30, 3, 64, 16), 2554), ((32, 8, 128, 16), 4864), ((26, 1, 256, 8), 3946)])
def test_the_spatial_gate_has_fewer_than_five_thousand_parameters(shape, total):
    """A projection D·r; channel weights and scales per layer; a temperature per layer and KV head; the lift adds none."""
    layers, kv_heads, dim, rank = shape
    gate = gates.make("spatial", GateConfig(layers, kv_heads, dim, rank, lift=128))
    counts = {"key": dim * rank, "channels": layers * min(64, dim // 2), "scale": layers * rank, "heat": layers * kv_heads}
    assert gate.counts() == counts
    assert sum(gate.counts().values()) == total < 5000
    with_thresholds = gates.make("spatial", GateConfig(layers, kv_heads, dim, rank, threshold=True))
    assert with_thresholds.counts()["threshold"] == layers * kv_heads


@pytest.mark.parametrize("pool", ["mean", "softmax"])
def test_the_spatial_gate_equals_numpy(pool, rng):
    layer, (query, key) = tools.gate_layer(pool=pool), vectors()
    visible = rng.random((2, 2, 128)) < 0.8
    got = np.asarray(scored(layer, query, key, visible=jnp.asarray(visible)))
    for b, h in np.ndindex(2, 2):
        want, ok = naive.spatial(layer, query[b, h], key[b, h], h, ok=visible[b, h]), visible[b, h]
        np.testing.assert_allclose(got[b, h][ok], want[ok], rtol=1e-4, atol=1e-4)


def test_the_lightning_indexer_equals_numpy():
    layer, (query, key) = tools.gate_layer("lightning"), vectors()
    got = np.asarray(scored(layer, query, key))
    for b, h in np.ndindex(2, 2):
        np.testing.assert_allclose(got[b, h], naive.lightning(layer, query[b, h], key[b, h], h), rtol=1e-4, atol=1e-4)


def test_an_untrained_spatial_gate_estimates_the_cosine():
    gate, (query, key) = gates.make("spatial", GateConfig(1, 2, 32, rank=32)), vectors(G=1)
    got = np.asarray(scored(gate.layer(0), query, key))
    cosine = np.einsum("bhgd,bhxd->bhx", query, key) / np.linalg.norm(query, axis=-1) / np.linalg.norm(key, axis=-1)
    assert np.corrcoef(got.ravel(), cosine.ravel())[0, 1] > 0.6


def test_channel_weights_are_those_of_rotary_pairs():
    """A key whose channels are weighed is what the gate makes of it without weights; queries likewise."""
    gate = gates.make("spatial", GateConfig(2, 2, 32, rank=8, channels=8))
    weights = jnp.arange(1.0, 17.0).reshape(2, 8)
    plain = gate.layer(1)
    weighed = gates.store.with_values(gate, {**gate.values(), "channels": weights}).layer(1)
    each = jnp.tile(jnp.repeat(weights[1], 2), 2)
    assert each[3] == each[2] == each[18] == weights[1, 1]
    query, key = (jnp.asarray(x) for x in vectors())
    np.testing.assert_allclose(scored(weighed, query, key), scored(plain, query * each, key * each), atol=1e-5)


def test_a_tied_gate_has_one_projection():
    one, two = (gates.make("spatial", GateConfig(1, 2, 32, rank=8, tied=tied)) for tied in (True, False))
    assert set(two.values()) - set(one.values()) == {"query"}
    query, key = vectors()
    a, b = (scored(g.layer(0), query, key) for g in (one, two))
    c = scored(gates.store.with_values(two, {**two.values(), "query": -two.values()["query"]}).layer(0), query, key)
    np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(c, -b, atol=1e-5)


@pytest.mark.parametrize("pool", ["mean", "softmax"])
def test_the_lift_leaves_scores_as_they_are(pool):
    """Wide index keys go through a product, narrow ones channel by channel: both agree."""
    query, key = vectors()
    narrow, wide = (scored(tools.gate_layer(pool=pool, lift=lift), query, key) for lift in (0, 128))
    assert tools.gate_layer(lift=128).index(jnp.asarray(key), 0).shape[-1] == 128
    np.testing.assert_allclose(narrow, wide, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_taken_out(kind):
    """CASES 23: with inputs before the rotary embedding, scores do not depend on where query and keys stand."""
    frequency, (query, key) = Rope(10_000.0).frequencies(32), vectors()
    layer, plain = dataclasses.replace(tools.gate_layer(kind), frequency=frequency), tools.gate_layer(kind)
    want = scored(plain, query, key)
    for seed, most in ((1, 200), (2, 30_000)):
        pos = np.random.default_rng(seed).integers(0, most, (2, 2, 128))
        now = pos.max(-1)
        turned = rotate(jnp.asarray(key), *rotary(jnp.asarray(pos), frequency))
        asked = rotate(jnp.asarray(query), *rotary(jnp.asarray(now)[..., None], frequency))
        np.testing.assert_allclose(scored(layer, asked, turned, jnp.asarray(pos), jnp.asarray(now)), want, atol=2e-4)
        assert np.abs(scored(plain, asked, turned) - want).max() > 0.1, "the test would not notice"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e4])
def test_zeros_and_large_numbers(kind, dtype, size):
    """Scores and gradients, with respect to parameters and inputs, are finite."""
    query, key = (jnp.asarray(size * np.sign(x), dtype) for x in vectors(X=64))
    for pool in ("mean", "softmax"):
        layer = tools.gate_layer(kind, pool=pool)
        names = [f.name for f in dataclasses.fields(layer) if isinstance(getattr(layer, f.name), jax.Array)]

        def loss(params, query, key, layer=layer):
            return (scored(dataclasses.replace(layer, **params), query, key) * jnp.linspace(-0.1, 0.1, 64)).sum()

        value, grads = jax.value_and_grad(loss, (0, 1, 2))({n: getattr(layer, n) for n in names}, query, key)
        assert np.isfinite(value)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(grads)), (kind, pool)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient(kind):
    gate, (query, key) = gates.make(kind, GateConfig(1, 2, 32, rank=8)), vectors()
    graph, params = nnx.split(gate, GateParam)
    grads = jax.grad(lambda p: (scored(nnx.merge(graph, p).layer(0), query, key)[..., :7] ** 2).sum())(params)
    assert all(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("flattening", [0.0, 0.3, 0.5, 1.0])
def test_normalising_inside_windows(flattening, rng):
    """What numpy gives; 0 changes nothing, and 1 ranks as a softmax inside every window."""
    score, visible = rng.standard_normal((3, 4, PAGE), np.float32), rng.random((3, 4, PAGE)) < 0.7
    got = np.asarray(windowed(jnp.asarray(score), jnp.asarray(visible), flattening))
    for row in range(3):
        want = naive.windowed(score[row].ravel(), visible[row].ravel(), flattening).reshape(4, PAGE)
        np.testing.assert_allclose(got[row], want, atol=1e-5)
    if flattening == 0:
        np.testing.assert_array_equal(got, score)
    if flattening == 1:
        share = naive.softmax(np.where(visible, score, -1e30)).reshape(3, -1)[0]
        flat, ok = got.reshape(3, -1)[0], visible.reshape(3, -1)[0]
        np.testing.assert_array_equal(np.argsort(flat[ok], kind="stable"), np.argsort(share[ok], kind="stable"))


def test_alpha_spans_none_and_softmax():
    make = lambda norm, alpha: tools.selection("hysparse", window_norm=norm, alpha=alpha).flattening
    assert make("tempered", 1.0) == make("none", 0.5) == 0
    assert make("tempered", 0.0) == make("softmax", 0.5) == 1


@pytest.mark.parametrize("dtype", naive.ROUNDING)
def test_index_keys_are_rounded_as_numpy_rounds(dtype, rng):
    selection = tools.selection("hysparse", dtype=dtype)
    index = rng.uniform(-1, 1, (2, 2, 8, 64)).astype(np.float32)
    stored = selection.pack(jnp.asarray(index))
    assert stored.dtype.itemsize == {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[dtype]
    np.testing.assert_allclose(selection.unpack(stored), naive.ROUNDING[dtype](index), atol=1e-7)


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_gate_comes_back_bit_for_bit(kind, tmp_path):
    config = GateConfig(3, 2, 32, rank=8, inputs="pre", pool="softmax", threshold=True)
    gate, path = gates.make(kind, config, seed=7), tmp_path / "gate.safetensors"
    gates.save(gate, path, {"steps": 3})
    again = gates.load(str(path))
    assert (again.kind, again.config) == (kind, config) and gates.store.origin(str(path)) == {"steps": 3}
    for a, b in zip(*(jax.tree.leaves(nnx.state(g, GateParam)) for g in (gate, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    gates.save(gates.make(kind, config, seed=8), path)
    assert not np.array_equal(gates.load(str(path)).key[...], gate.key[...]), "a file that changed is read again"


def test_files_that_are_no_gates(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    with pytest.raises(ConfigError, match="no such file"):
        gates.load(str(path))
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="no gate that kvlab saved"):
        gates.load(str(path))
    save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(ConfigError, match="no gate that kvlab saved"):
        gates.load(str(path))
    gates.save(gates.make("spatial", GateConfig(2, 2, 32, rank=8)), path)
    with pytest.raises(ConfigError, match="is of kind 'spatial'"):
        tools.REGISTERED["lightning"](gate=str(path)).at(0, tools.tiny_model().config, 256)
    with pytest.raises(ConfigError, match="the model has 2, 2 of 16"):
        tools.REGISTERED["hysparse"](gate=str(path)).at(0, tools.tiny_model().config, 256)
    with pytest.raises(ConfigError, match="without thresholds"):
        tools.REGISTERED["hysparse"](gate=str(path), mode="threshold").at(0, tools.tiny_model(head_dim=32).config, 256)
    with pytest.raises(ConfigError, match="no gate; write gate"):
        tools.REGISTERED["hysparse"]().at(0, tools.tiny_model().config, 256)


@pytest.mark.parametrize("options,words", [({"rank": 0}, "rank=0"), ({"rank": 33}, "rank=33"), ({"lift": 4}, "lift=4"),
                                           ({"channels": 5}, "channels=5"),
                                           ({"pool": "max"}, "pool='max'"), ({"inputs": "both"}, "inputs='both'")])  # fmt: skip
def test_shapes_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        GateConfig(2, 2, 32, **{"rank": 8, **options})
    with pytest.raises(ConfigError, match="spatial"):
        gates.make("spatail", GateConfig(2, 2, 32))
