"""Kernels of decode attention: against numpy in interpret mode, inside decoding, and lowered for hardware that is not here."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvlab import attention, kernels, loop, parts
from kvlab.attention import AttentionSpec
from kvlab.codec import KV, Fp8, Hadamard, Int8, Raw
from kvlab.core import Record
from kvlab.decode import Engine, per_layer
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.kernels import BACKENDS, codes, page, shapes
from kvlab.kernels.backends import Backend
from kvlab.layout import LAYOUTS, Bicl, Contiguous, Paged
from kvlab.loop import State
from kvlab.models import load
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Window
from kvlab.selection import Quest, ReadAll
from tests import tools

pytestmark = pytest.mark.compiled_quickly

FORMS = {"loop": BACKENDS["interpret"], "grid": Backend("grid, step by step", "grid", None, interpret=True)}
EVERY_CODEC = {
    "float32": Raw(), "float16": Raw("float16"), "bfloat16": Raw("bfloat16"),
    **{f"int8 {scale}": Int8(scale) for scale in ("token", "channel", "tensor")},
    **{f"fp8 {form} {scale}": Fp8(form, scale) for form in ("e4m3", "e5m2") for scale in ("token", "channel", "none")},
}  # fmt: skip
EVERY_LAYOUT = {name: cls() for name, cls in LAYOUTS.items()} | {"bicl 32": Bicl(32)}
MIXED, TURNED = KV(Int8("channel"), Fp8()), KV(Fp8("e5m2", "token"), Int8("channel"))
TOGETHER = [KV(k, v) for k, v in zip(EVERY_CODEC.values(), [*EVERY_CODEC.values()][5:] + [*EVERY_CODEC.values()][:5])]
CASES = [("loop", "contiguous", codec) for codec in TOGETHER] + [("grid", "contiguous", codec) for codec in TOGETHER[::2]]
CASES += [(form, layout, codec) for form in FORMS for layout in ("bicl", "bicl 32") for codec in (Raw(), MIXED, TURNED)]
CASES += [(form, layout, codec) for form in FORMS for layout, codec in (("page_major", TURNED), ("paged", MIXED))]
NAMES = [f"{form}-{layout}-{codes.name(codec.keys)} {codes.name(codec.values)}" for form, layout, codec in CASES]
STATIC = ("spec", "backend", "splits", "by_page")


@functools.partial(jax.jit, static_argnames=STATIC)
def by_kernel(policy, cache, query, pos, index, spec, backend, splits=2, by_page=False):
    """What a back end of any name leaves, as `kernels.read` would."""
    kernel = kernels.find(policy, kernels.OPERATIONS[index is not None])
    facts = kernels.decode.facts(cache, pos, policy.unit, policy.retention.visibility(), spec, policy.tailed, index)
    return kernel(backend, policy.layout, cache.memory, query * spec.scale, cache.pos, facts, spec, index, splits, by_page)


def by_numpy(policy, cache, query, pos, spec, pages=None):
    """Output, log-sum-exp and entropy over what is coded, and each page's log-sum-exp, in double precision."""
    code = policy.layout.slice(cache.memory, 0, cache.pos.shape[2])
    key, value = (np.asarray(c.decode(code[s]), np.float64) for s, c in (("k", policy.codec.keys), ("v", policy.codec.values)))
    at, now, rule = np.asarray(cache.pos), np.asarray(pos)[:, None, None, None], policy.retention.visibility()
    ok = np.asarray(spec.sees(at, now) & rule.mask(at, now))
    number = np.arange(at.shape[2])
    if policy.tailed:
        ok = ok & ~(np.asarray(cache.waiting)[..., None] == number).any(2)[..., None]
    if pages is not None:
        ok = ok & np.isin(number, pages)[:, None]
    logits = np.einsum("bhgd,bhnpd->bhgnp", np.asarray(query, np.float64) * spec.scale, key)
    logits = logits if spec.softcap is None else spec.softcap * np.tanh(logits / spec.softcap)
    weight = np.where(ok[:, :, None], np.exp(logits), 0.0)
    by_page = weight.sum(-1)
    total = by_page.sum(-1)
    share = weight / np.where(total > 0, total, 1)[..., None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(share > 0, share * np.log(share), 0).sum((-1, -2))
        return np.einsum("bhgnp,bhnpd->bhgd", share, value), np.log(total), entropy, np.log(by_page)


def agrees(policy, shape, spec, backend, listed=None, atol=1e-5, **options):
    policy = shape.policy(policy)
    cache, query, pos = shapes.filled(shape, policy)
    index = None
    if listed is not None:
        index = jnp.broadcast_to(jnp.array(listed, jnp.int32), (shape.batch, shape.kv_heads, len(listed)))
    got, pages = by_kernel(policy, cache, query, pos, index, spec, backend, by_page=True, **options)
    want = by_numpy(policy, cache, query, pos, spec, listed)
    for x, y in zip(attention.finish(got), want):
        np.testing.assert_allclose(x, y, atol=atol, rtol=atol)
    walked = np.arange(cache.pos.shape[2]) if listed is None else [n for n in listed if n >= 0]
    np.testing.assert_allclose(pages[..., : len(walked)], want[3][..., walked], atol=1e-4, rtol=1e-4)
    assert (np.asarray(pages[..., len(walked) :]) == -np.inf).all()
    empty = ~np.isfinite(want[1])
    np.testing.assert_allclose(kernels.decode.shares(got, pages).sum(-1), np.where(empty, 0, 1), atol=1e-5)


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_a_kernel_is_attention_over_what_is_stored(number):
    """Ragged rows, one of them empty; every codec, every layout; alternately all pages and a list that ends in −1."""
    form, layout, codec = CASES[number]
    policy = Policy(KeepAll(), codec, EVERY_LAYOUT[layout], ReadAll())
    agrees(policy, shapes.SMALL["64"], AttentionSpec(0.125), FORMS[form], [2, 0, -1] if number % 2 else None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout,dim,codec,spec,listed", [
    ("contiguous", "80", Raw("bfloat16"), AttentionSpec(0.1, softcap=5.0), None),
    ("bicl", "80", KV(Int8("channel"), Fp8("e4m3", "channel")), AttentionSpec(0.1), None),
    ("contiguous", "128", Int8("channel"), AttentionSpec(0.1, window=100), [1, 3]),
    ("bicl 32", "128", Raw("bfloat16"), AttentionSpec(0.1), [3, 1, 0, -1]),
    ("paged", "256", Raw(), AttentionSpec(0.0625, softcap=2.0), None),
    ("page_major", "256", Raw("bfloat16"), AttentionSpec(0.0625), [0, -1]),
])  # fmt: skip
def test_heads_of_many_sizes_and_what_models_ask(layout, dim, codec, spec, listed, form):
    """Head dimensions 80, 128 and 256; a window of the retention's or the model's, and a cap."""
    policy = Policy(KeepAll() if listed else Window(90, 4), codec, EVERY_LAYOUT[layout], ReadAll())
    agrees(policy, shapes.SMALL[dim], spec, FORMS[form], listed)


@pytest.mark.parametrize("form", FORMS)
def test_splits_change_nothing(form):
    """One split, several, and more than there are pages."""
    policy, shape, spec = Policy(KeepAll(), Raw(), Contiguous(), ReadAll()), shapes.SMALL["128"], AttentionSpec(0.1)
    for splits in (1, 3, 7):
        agrees(policy, shape, spec, FORMS[form], splits=splits)


def test_rows_of_padding_change_nothing():
    """As a GPU has them: nine rows for three heads, and seven more."""
    policy, spec = Policy(KeepAll(), MIXED, Bicl(), ReadAll()), AttentionSpec(0.125)
    agrees(policy, shapes.SMALL["64"], spec, dataclasses.replace(FORMS["loop"], queries=16))


def test_the_parts_of_a_number_add_up_to_it():
    """Of float32 numbers of many sizes, in compiled code, bit for bit; rows of padding get nothing."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((5, 999)) * 2.0 ** rng.integers(-90, 90, (5, 999))).astype(np.float32)
    own = jax.jit(page.Stack(5, 3).own)(np.concatenate([x, x, x, np.zeros_like(x[:1])]))
    assert own.dtype == jnp.bfloat16 and not np.asarray(own[15:], np.float32).any()
    parts = np.asarray(own[:15], np.float64).reshape(3, 5, 999)
    np.testing.assert_array_equal(parts.sum(0), x.astype(np.float64))
    assert (np.abs(parts[2]).max(1) > 0).all()


def products(jaxpr) -> list[tuple[str, ...]]:
    """Types of the factors of every product in a program and in what it calls."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(tuple(x.aval.dtype.name for x in eqn.invars))
        inner = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")))
        found += [one for x in inner if hasattr(x, "eqns") for one in products(x)]
    return found


@pytest.mark.parametrize("name", [n for n, b in BACKENDS.items() if b.platform])
def test_what_bfloat16_holds_is_multiplied_by_units_for_it(name):
    """Keys and values take such a product each, and the sum of the parts one of float32; other codecs take float32's two."""
    narrow, wide, shape = ("bfloat16",) * 2, ("float32",) * 2, shapes.SMALL["64"]
    for codec in (*EVERY_CODEC.values(), KV(Raw(), Int8()), KV(Fp8(), Raw("float16"))):
        policy = Policy(KeepAll(), codec, EVERY_LAYOUT["page_major"], ReadAll())
        traced = by_kernel.trace(policy, *cache_shapes(policy, shape), None, AttentionSpec(0.1), BACKENDS[name])
        sides = [narrow if codes.name(c) not in ("float32", "float16") else wide for c in (codec.keys, codec.values)]
        assert sorted(products(traced.jaxpr.jaxpr)) == sorted(sides + [wide] * (sides[0] == narrow)), codec


def test_small_floats_are_what_their_formats_say():
    """Every pattern of float16 and of both kinds of 8 bits, subnormal numbers among them; e4m3's one NaN is never stored."""
    for kind, like, widths in (
        (np.float16, np.uint16, (5, 10)), (ml_dtypes.float8_e5m2, np.uint8, (5, 2)), (ml_dtypes.float8_e4m3fn, np.uint8, (4, 3)),
    ):  # fmt: skip
        bits = np.arange(2 ** (8 * np.dtype(like).itemsize)).astype(like)
        with np.errstate(invalid="ignore"):
            want = bits.view(kind).astype(np.float32)
        got = np.asarray(jax.jit(codes.small_float, static_argnums=(1, 2))(bits, *widths))
        known = np.ones(bits.size, bool) if kind is not ml_dtypes.float8_e4m3fn else np.isfinite(want)
        np.testing.assert_array_equal(got[known], want[known])


@pytest.mark.parametrize("retention,codec,layout,selection", [
    (Window(70, 4), KV(Int8("channel"), Int8()), Bicl(32), ReadAll()),
    (tools.RETENTIONS["key_norm"], Hadamard(Int8()), Bicl(), ReadAll()),
    (KeepAll(), Raw("float16"), Paged(), Quest(sparsity=0.5, recent=8)),
])  # fmt: skip
def test_a_policy_reads_alike_by_kernel(retention, codec, layout, selection):
    """Steps with the raw tail, evictions and a selection of pages: outputs, lse, entropy, reads and bounds of both ways."""
    s = tools.sequence(steps=70)
    plain = Policy(retention, codec, tools.bound(layout), selection)
    want, got = (tools.run(policy, s)[2] for policy in (plain, dataclasses.replace(plain, implementation="interpret")))
    for name in ("out", "lse", "entropy"):
        np.testing.assert_allclose(got[name], want[name], atol=2e-5)
    for name in ("reads", "bound"):
        np.testing.assert_array_equal(got[name], want[name])


def cache_shapes(policy, shape):
    """A cache, queries and positions without numbers."""
    like, B, T = jax.ShapeDtypeStruct, shape.batch, shape.room
    vector = like((B, shape.kv_heads, T, shape.head_dim), jnp.float32)
    cache = jax.eval_shape(lambda record: policy.fill(record, T), Record(vector, vector, like((B, T), jnp.int32)))
    return cache, like((B, shape.kv_heads, shape.groups, shape.head_dim), jnp.float32), like((B,), jnp.int32)


MARKS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}


@pytest.mark.parametrize("name", [n for n, b in BACKENDS.items() if b.platform])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_kernel_lowers_for_its_hardware(layout, name):
    """Every codec for keys and for values, alternately all pages and named ones with what each got, heads of all sizes."""
    backend, turn = BACKENDS[name], itertools.cycle(("64", "80", "128", "256", "64"))
    for i, codec in enumerate(TOGETHER):
        shape = dataclasses.replace(shapes.SMALL[next(turn)], lengths=(64,), kv_heads=1)
        index = jax.ShapeDtypeStruct((1, 1, 3), jnp.int32) if i % 2 else None
        policy = shape.policy(Policy(KeepAll(), codec, EVERY_LAYOUT[layout], ReadAll()))
        spec = AttentionSpec(0.1, softcap=5.0 if index is None else None)
        traced = by_kernel.trace(policy, *cache_shapes(policy, shape), index, spec, backend, by_page=index is not None)
        assert MARKS[backend.platform] in traced.lower(lowering_platforms=(backend.platform,)).as_text()


def test_every_pair_of_codecs_is_registered():
    """The registry is the product of what `small` kernels there are, and names of codecs are those of the table above."""
    assert set(codes.NUMBERS) == set(EVERY_CODEC) == {codes.name(codec) for codec in EVERY_CODEC.values()}
    assert {key[0] for key in kernels.KERNELS} == set(LAYOUTS.values())
    assert len(kernels.KERNELS) == len(LAYOUTS) * len(EVERY_CODEC) ** 2 * 2


def decoding(policy, model):
    """The arguments of the decode loop for two rows with room for 192 tokens, without numbers."""
    config, like = model.config, jax.ShapeDtypeStruct
    policies = per_layer(policy, config)
    vector = like((2, config.kv_heads, 128, config.head_dim), jnp.float32)
    record = Record(vector, vector, like((2, 128), jnp.int32))
    caches = tuple(jax.eval_shape(lambda r, p=p: p.fill(r, 192), record) for p in policies)
    row = like((2,), jnp.int32)
    state = State(caches, row, row, row, like((2,), jnp.bool_))
    return config, model.params, policies, state, None, like((2, 1), jnp.int32), like((1,), jnp.int32), 4, frozenset()


@pytest.mark.parametrize("name", [n for n, b in BACKENDS.items() if b.platform])
@pytest.mark.parametrize("layout", ["contiguous", "paged", "bicl"])
def test_the_decode_loop_lowers_for_hardware(layout, name, tiny):
    policy = parts.policy({"layout": layout, "codec": "int8", "implementation": name})
    traced = loop.decode.trace(*decoding(policy, tiny))
    platform = BACKENDS[name].platform
    assert traced.lower(lowering_platforms=(platform,)).as_text().count(MARKS[platform]) >= 1


@pytest.mark.parametrize("table", [
    {"layout": "bicl", "codec": {"k": {"name": "int8", "scale": "channel"}, "v": "int8"}},
    {"layout": "paged", "codec": {"name": "raw", "dtype": "bfloat16"}},
], ids=["bicl", "paged"])  # fmt: skip
def test_tiny_recall_answers_alike(table):
    """The model that ships decodes 70 tokens in the jitted loop, past the end of a page, and names what XLA names."""
    engine = Engine(load("tiny-recall"))
    rng = np.random.default_rng(0)
    prompt = engine.prefill([rng.integers(0, engine.config.vocab, n).tolist() for n in (150, 100)])
    answers = []
    for how in ("xla", "interpret"):
        session = engine.start(prompt, parts.policy({**table, "implementation": how}), 70)
        session.run(70)
        answers.append(session.tokens)
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("table,reason", [
    ({"codec": "int4"}, "no kernel reads keys of Int4"),
    ({"codec": {"k": "int8", "v": "nf4"}}, "no kernel reads values of NF4"),
    ({"codec": {"name": "pre_rope", "inner": "int8"}}, "no kernel reads keys of PreRope"),
    ({"selection": {"name": "top_p"}}, "picks single tokens"),
    ({"selection": {"name": "recency", "sparsity": 0.5}}, "picks single tokens"),
    ({"retention": {"name": "adakv", "inner": {"name": "snapkv", "ratio": 0.5}}}, "unequal budgets"),
    ({"retention": "duoattention"}, "unequal budgets"),
])  # fmt: skip
def test_what_no_kernel_reads_is_refused(table, reason):
    parts.policy(table)
    with pytest.raises(RefusedPolicy, match=reason) as error:
        parts.policy({**table, "implementation": "interpret"})
    assert 'implementation = "xla"' in str(error.value)


def test_a_selection_that_answers_in_tokens_is_refused_when_it_does():
    policy = Policy(KeepAll(), Raw(), Contiguous(), tools.OddTokens(), "interpret")
    cache, query, pos = shapes.filled(shapes.SMALL["64"], policy)
    with pytest.raises(RefusedPolicy, match="OddTokens.* picks single tokens"):
        policy.attend(cache, query, pos, AttentionSpec(0.125))


def test_names_are_checked_and_told():
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        parts.policy({"implementation": "tritn"})
    with pytest.raises(RefusedPolicy, match="allowed: interpret, tpu, triton, xla"):
        Policy(KeepAll(), Raw(), Contiguous(), ReadAll(), "cuda")
    assert parts.describe({"implementation": "interpret"}) == "full + interpret kernel"
    assert parts.describe({"codec": "int8", "implementation": "xla"}) == "int8"


@pytest.mark.parametrize("name", [n for n, b in BACKENDS.items() if b.platform])
def test_hardware_that_is_not_here_is_named(name, tiny):
    """Not when the program is traced or lowered for that hardware, but when it would run."""
    engine = Engine(tiny)
    session = engine.start(engine.prefill([[1, 2, 3]]), parts.policy({"implementation": name}), 2)
    with pytest.raises(RefusedPolicy, match=f"'{name}' runs on a.* but this program is for cpu"):
        session.run(2)


def test_a_head_dimension_that_triton_cannot_hold_is_refused():
    shape = dataclasses.replace(shapes.SMALL["80"], head_dim=72)
    policy = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())
    with pytest.raises(RefusedPolicy, match="multiples of 16"):
        by_kernel.trace(policy, *cache_shapes(policy, shape), None, AttentionSpec(0.1), BACKENDS["triton"])


def test_a_local_layer_keeps_the_implementation():
    policies = per_layer(
        parts.policy({"implementation": "interpret"}), dataclasses.replace(tools.tiny_model().config, windows=(60, None))
    )
    assert [policy.implementation for policy in policies] == ["interpret", "interpret"]
