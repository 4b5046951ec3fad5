"""What several tests use: parts by name, random records, a dense oracle in numpy, a tiny model."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvlab import gates
from kvlab.codec import KV, NF4, Fp8, Hadamard, Int2, Int4, Int8, Kivi, Outliers, PreRope, Raw
from kvlab.core import EMPTY, PAGE, Pages, Retention, Selection, Tokens, part, static
from kvlab.errors import RefusedPolicy
from kvlab.layout import Bicl, Contiguous, PageMajor
from kvlab.models import Model, transformer
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Protect, Window
from kvlab.selection import SELECTIONS as REGISTERED
from kvlab.selection import DoubleSparsity, Quest, ReadAll, TopP
from kvlab.selection.gated import Gated
from kvlab.selection.top import Top
from kvlab.testing.contract import SHAPE
from kvlab.testing.sequence import Sequence, append, appended, decode, run, sequence, stored, through  # noqa: F401
from tests import naive


@part
class KeyNorm(Retention):
    """Evicts the token whose key is longest: a rule with a score of its own, for tests of per-token state."""

    size: int = static(default=96)
    unit: int | None = static(default=1)
    pool = "mean"

    def budget(self, prompt, total, unit):
        return self.size

    def score(self, key, value, pos):
        return jnp.linalg.norm(key, axis=-1)

    def priority(self, state, pos, now):
        return jnp.where(pos == now, jnp.inf, -state)


@part
class LatePages(Selection):
    """The last `count` pages that hold anything, and the open one: a selection that answers in pages."""

    count: int = static(default=2)

    def select(self, state, query, visible, cache, around):
        newest = jnp.where(visible, cache.pos, EMPTY).max(-1)
        top, index = jax.lax.top_k(newest, min(self.count, newest.shape[-1]))
        return Pages(jnp.where(top >= 0, index, -1))


@part
class OddTokens(Selection):
    """Tokens at odd positions: a selection that answers in slots."""

    def select(self, state, query, visible, cache, around):
        B, H, N, P = visible.shape
        ok = (visible & (cache.pos % 2 == 1)).reshape(B, H, N * P)
        order = jnp.argsort(~ok, -1, stable=True)
        return Tokens(jnp.where(jnp.take_along_axis(ok, order, 2), order, -1))


RETENTIONS = {
    "keep_all": KeepAll(),
    "window": Window(70, 4),
    "key_norm": KeyNorm(),
    "key_norm_pages": KeyNorm(128, PAGE),
    "protect": Protect(Window(70, 0), sinks=4, recent=8),
}
CODECS = {
    "raw": Raw(),
    "float16": Raw("float16"),
    "bfloat16": Raw("bfloat16"),
    "int8_token": Int8(),
    "int8_channel": Int8("channel"),
    "kivi": KV(Int8("channel"), Int8("token")),
}
FREQUENCIES = (1e4 ** -np.linspace(0, 1, 16, endpoint=False)).astype(np.float32)
MORE_CODECS = {  # for head dimensions of 32 and more; tests/test_coded_caches.py has them with every layout
    "int8_tensor": Int8("tensor"),
    "fp8": Fp8(),
    "fp8_channel": Fp8("e5m2", "channel"),
    "fp8_none": Fp8(scale="none"),
    "int4": Int4(),
    "int4_channel": Int4("channel", 16),
    "int2": Int2(group_size=16, residual=64),
    "kivi_2": Kivi(2, residual=0),
    "kivi_4": Kivi(4, residual=64),
    "nf4": NF4(32),
    "hadamard": Hadamard(Raw("float16")),
    "outliers": Outliers(Int4(), 0.05),
    "outliers_kivi": Outliers(Kivi(4, residual=0), 0.01),
    "pre_rope": PreRope(Raw("float16"), FREQUENCIES),
}
LAYOUTS = {"contiguous": Contiguous(), "page_major": PageMajor(), "bicl": Bicl(32)}


@functools.cache
def gate_layer(kind="spatial", kv_heads=2, head_dim=32, seed=0, **shape):
    """The first layer of an untrained gate, whose parameters are moved apart so that none is neutral."""
    gate = gates.make(kind, gates.GateConfig(2, kv_heads, head_dim, **{"rank": 8, **shape}), seed)
    rng = np.random.default_rng(seed)
    moved = {n: x + 0.3 * rng.standard_normal(x.shape, np.float32) for n, x in nnx.to_pure_dict(nnx.state(gate)).items()}
    return gates.store.with_values(gate, moved).layer(0)


def selection(name, layer=None, **options):
    """A registered selection; gated ones get a gate without a file."""
    cls = REGISTERED[name]
    if issubclass(cls, Gated):
        options |= {"gate": "made", "layer": layer or gate_layer(cls.kind)}
    return cls(**options)


SELECTIONS = {
    "read_all": ReadAll(),
    "pages": LatePages(),
    "tokens": OddTokens(),
    "hysparse": selection("hysparse", sparsity=0.6, recent=8),
    "quest": selection("quest", sparsity=0.5, recent=8),
    "short_keys": selection("key_norm", sparsity=0.7, recent=8, granularity="page"),
}
PRODUCT = list(itertools.product(RETENTIONS, CODECS, LAYOUTS, SELECTIONS))
# every pair of parts occurs in one of these: a Latin square, and for the retention that it lacks, the first one
COVERING = [
    (r, c, "contiguous", s)
    for i, r in enumerate(RETENTIONS)
    for j, c in enumerate(CODECS)
    for k, s in enumerate(SELECTIONS)
    if (i + j + k) % 6 == 0 or (i, (j + k) % 6) == (0, 1)
]
# other layouts meet every other part once; tests/test_layout.py has them with every codec
COVERING += [(r, c, "page_major", s) for r, c, s in zip(itertools.cycle(RETENTIONS), CODECS, SELECTIONS)]
COVERING += [(r, c, "bicl", s) for r, c, s in zip(itertools.cycle(RETENTIONS), CODECS, [*SELECTIONS][1:] + [*SELECTIONS][:1])]
QUICK = [names for names in PRODUCT if names[2] != "bicl" or names in COVERING]  # for checks by shape; the rest is slow


def bound(layout, dim=32):
    """The layout as for a model whose heads are this wide."""
    return layout.at(0, dataclasses.replace(SHAPE, head_dim=dim))


def make(retention, codec, layout, selection, dim=32) -> Policy:
    """The named product, or a declared skip with the reason of the refusal."""
    try:
        where = bound(LAYOUTS[layout], dim)
        return Policy(RETENTIONS[retention], (CODECS | MORE_CODECS)[codec], where, SELECTIONS[selection])
    except RefusedPolicy as error:
        pytest.skip(f"refused: {error}")


rows = jax.jit(Policy.rows, static_argnums=3)
truncate = jax.jit(Policy.truncate)


@functools.partial(jax.jit, static_argnums=2)
def codes(policy: Policy, cache, pages: int):
    """Canonical codes of a cache's first pages."""
    return policy.layout.slice(cache.memory, 0, pages)


def oracle(policy: Policy, s: Sequence, seen, step: int):
    """Dense attention in numpy over what the slots say they hold: codes of full pages, the open page exact."""
    rule, spec = policy.retention.visibility(), s.spec
    out = np.zeros(seen["out"].shape[1:])
    for b, h in np.ndindex(out.shape[:2]):
        pos, now = seen["pos"][step, b, h].reshape(-1), s.lengths[b] + step
        key, value = stored(policy, s, seen["pos"][step], seen["waiting"][step], b, h)
        ok = np.asarray(spec.sees(pos, now) & np.asarray(rule.mask(pos, now)))
        logits = np.asarray(spec.cap(jnp.asarray(s.query[step, b, h] @ key.T * spec.scale)))
        ok &= _selected(policy.selection, s, seen, (step, b, h), ok, logits)
        if ok.any():
            weight = np.where(ok, np.exp(logits - logits[:, ok].max(-1, keepdims=True)), 0)
            out[b, h] = (weight / weight.sum(-1, keepdims=True)) @ value
    return out


def _selected(selection, s: Sequence, seen, at, ok, logits):
    step, b, h = at
    pos = seen["pos"][at]
    if isinstance(selection, LatePages):
        newest = np.where(ok.reshape(pos.shape), pos, EMPTY).max(-1)
        pages = [n for n in np.argsort(-newest, kind="stable")[: selection.count] if newest[n] >= 0]
        return np.isin(np.repeat(np.arange(len(pos)), PAGE), pages)
    if isinstance(selection, OddTokens):
        return pos.reshape(-1) % 2 == 1
    if not isinstance(selection, Top | TopP):
        return np.ones(pos.size, bool)
    key = np.where(pos.reshape(-1, 1) >= 0, s.key[b, h][np.maximum(pos.reshape(-1), 0)], 0)
    held = _held(s, seen, at) if isinstance(selection, Quest) else None
    if isinstance(selection, DoubleSparsity):
        first = seen["first"][b, h]
        held = naive.channels(s.key[b, h][first[first >= 0]], selection.channels)
    return naive.select(selection, s.query[at] * np.float32(s.spec.scale), key, logits, pos, ok, h, held)


def _held(s: Sequence, seen, at):
    """Keys that each page has held since it was last empty; Quest's bounds only widen."""
    step, b, h = at
    held = [set(page[page >= 0].tolist()) for page in seen["first"][b, h]]
    for t in range(step + 1):
        for n, page in enumerate(seen["pos"][t, b, h]):
            now = set(page[page >= 0].tolist())
            alone = now == {s.lengths[b] + t}
            held[n] = now if alone else held[n] | now
    return [s.key[b, h][sorted(page)] for page in held]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    bos = None
    begin: list[int] = []

    def prompt(self, text):
        return self.begin + self.encode(text)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(int(i) % 256 for i in ids).decode(errors="replace")

    def strings(self, ids):
        return [self.decode([i]) for i in ids]


def tiny_model(**changes) -> Model:
    shape = {"layers": 2, "hidden": 48, "ffn": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "vocab": 256, "context": 1024}
    config = ModelConfig(**{**shape, **changes})
    return Model("tiny", config, transformer.init(config, 0), Bytes(), "0" * 64, ())
