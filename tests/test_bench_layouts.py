"""What `kvlab bench layouts` times is right, and it reports what it says."""

import jax
import numpy as np
import pytest

from kvlab import memory
from kvlab.attention import AttentionSpec, dense
from kvlab.bench import layouts
from kvlab.bench.select import DIM, attend, gated
from kvlab.codec import Int8
from kvlab.core import PAGE, Around
from kvlab.policy import Policy
from kvlab.retention import KeepAll


def test_gate_int8_and_tiles_in_one_policy_equal_their_reference():
    """Half of 32 pages: attention in numpy's order over decoded INT8, masked to the pages that the gate names."""
    selection, codec = gated("page", 0.5, "float16"), Int8()
    policy = Policy(KeepAll(), codec, layouts.LAYOUTS[layouts.FUSED], selection)
    record, query, now = layouts.numbers(2048)
    cache = layouts.filled(policy, record, 2048)
    out, reads = jax.jit(attend)(policy, cache, query, now)
    choose = lambda cache, query: (
        selection.select(cache.index, query * DIM**-0.5, cache.pos >= 0, cache, Around(None, None)).index
    )
    picked = np.asarray(jax.jit(choose)(cache, query))[0]
    ok = np.stack([np.repeat(np.isin(np.arange(32), pages), PAGE) for pages in picked])[None]
    back = lambda x: np.asarray(codec.decode(codec.encode(x.reshape(1, 8, 32, PAGE, DIM)))).reshape(1, 8, 2048, DIM)
    want = jax.jit(dense, static_argnums=4)(
        query, back(record.key_BHTD), back(record.value_BHTD), ok[:, :, None], AttentionSpec(DIM**-0.5)
    )
    assert 0.45 < ok.mean() < 0.55 and (np.asarray(reads) == ok.sum(-1)).all()
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("way", layouts.TOKEN_MAJOR)
def test_token_major_memory_is_read_rightly_in_every_way(way):
    layout, blocks = layouts.TOKEN_MAJOR[way]
    record, query, now = layouts.numbers(17 * PAGE)
    policy = Policy(KeepAll(), layouts.Blocked() if blocks else layouts.Raw(), layout, layouts.ReadAll())
    out, _ = jax.jit(attend)(policy, layouts.filled(policy, record, 17 * PAGE), query, now)
    want = jax.jit(dense, static_argnums=4)(
        query, record.key_BHTD, record.value_BHTD, np.ones((1, 1, 1, 1), bool), AttentionSpec(DIM**-0.5)
    )
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_the_benchmark_reports_every_figure(monkeypatch, capsys):
    some = lambda whole, *names: {name: whole[name] for name in names}
    monkeypatch.setattr(layouts, "LAYOUTS", some(layouts.LAYOUTS, "contiguous", "page_major", "bicl_64"))
    monkeypatch.setattr(layouts, "CODECS", some(layouts.CODECS, "int8_token"))
    monkeypatch.setattr(layouts, "TOKEN_MAJOR", some(layouts.TOKEN_MAJOR, "product"))
    monkeypatch.setattr(layouts, "DENSE_FP32", ("contiguous", "page_major"))
    figures = layouts.main([256], 1, 512, 0.5)
    assert figures["fusion_speedup"] > 0 and figures["fusion"]["dense"] in layouts.DENSE_FP32
    found = figures["int8_token"]["256"]
    assert found["contiguous"]["over_contiguous"] == 1 and set(found) == {*layouts.LAYOUTS, "token_major"}
    for name, x in found.items():
        assert x["ms"] > 0 and x["fraction_of_read_bandwidth"] > 0 and 0 < x["temporaries"] < 2**22, name


def test_int8_caches_of_all_layouts_take_the_same_bytes():
    record, _, _ = layouts.numbers(256)
    policies = [
        Policy(KeepAll(), Int8(), layouts.LAYOUTS[name], layouts.ReadAll()) for name in ("contiguous", "bicl_64", "bicl_32")
    ]
    assert len({memory.resident(layouts.filled(policy, record, 256)) for policy in policies}) == 1
