"""Kinds of claims on where codes lie: simulated, by arithmetic and by the clock, both ways."""

import itertools
import math

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kvlab.attention import AttentionSpec
from kvlab.claims import padding, page, timed
from kvlab.claims.base import FAILS, HOLDS, OPEN
from kvlab.claims.locality import Locality
from kvlab.claims.miss_rates import MissRates
from kvlab.claims.padding import Padding
from kvlab.claims.product_time import ProductTime
from kvlab.claims.read_time import ReadTime
from kvlab.claims.row_time import RowTime
from kvlab.claims.step_time import StepTime
from kvlab.core import Record
from kvlab.errors import ConfigError
from kvlab.locality.reads import Reads

ALPHA = 0.05
SPEC = AttentionSpec(0.125)
SMALL = Reads(tokens=1024, kv_heads=4, heads=1)


def test_lines_by_layout():
    test = lambda reads, **more: Locality(name="t", layout="bicl_64", against="head_major", reads=reads, **more).find({}, ALPHA)
    dense = test(SMALL, more_than=1.0)
    assert (dense.outcome, dense.value) == (FAILS, 1.0) and "8,192 times, 1 to 1" in dense.text
    far = msgspec.structs.replace(SMALL, walk="channels", block=1024)
    against_the_grain = test(far, more_than=6.0, beside=["token_major"])
    assert against_the_grain.outcome == HOLDS and against_the_grain.value > 10
    assert [row["layout"] for row in against_the_grain.table] == ["head_major", "bicl_64", "token_major"]
    huge = test(far, more_than=6.0, first=(1 << 20, 64, 64))
    assert (huge.outcome, huge.value) == (FAILS, 1.0), "what fits is fetched once in any order"
    with pytest.raises(ConfigError, match="cannot have 7 ways"):
        test(SMALL, first=(1 << 15, 7, 64))


def test_rates_that_can_be_reached():
    """Head-major keys and values, a load of 16 bytes, miss a quarter of the time; walked token by token tiles miss 5.6 %."""
    options = {"plain": ["head_major"], "tiled": ["bicl_64"], "reads": [SMALL], "walks": [("stored", 64), ("tokens", 64)]}
    reached = MissRates(name="t", says=(0.25, 0.056), **options).find({}, ALPHA)
    assert reached.outcome == HOLDS and "1.00 times the lines with 4.5 times the accesses" in reached.text
    only = {**options, "walks": [("stored", 64)]}
    stored = MissRates(name="t", says=(0.25, 0.056), **only).find({}, ALPHA)
    assert stored.outcome == FAILS and "none of 6 that are walked alike, the nearest head_major" in stored.text
    assert "3.1 % with 2 bytes" in stored.text and "load over line, so a rate alone says nothing" in stored.text
    crossed = MissRates(name="t", says=(0.5, 0.5), near=0.01, **options).find({}, ALPHA)
    assert crossed.outcome == HOLDS and "such as head_major 50.0 %" in crossed.text
    none = MissRates(name="t", says=(0.9, 0.9), near=0.01, **only).find({}, ALPHA)
    assert "90.0 % comes out in none of 6 cases" in none.text


def test_padded_bytes_and_sectors():
    assert padding.width(80, "float16", "256") == 128 and padding.width(192, "float16", "power") == 256
    assert padding.width(192, "float32", "256") == 192 and padding.width(192, "float32", "both") == 256
    assert padding.width(64, "int8", "256") == 256
    brute = lambda useful, row, size: np.mean([len({b // size for b in range(i * row, i * row + useful)}) for i in range(size)])
    for useful, row, size in itertools.product((80, 96, 112), (112, 160, 256), (32, 128)):
        assert padding.touched(useful, row, size) == pytest.approx(brute(useful, row, size))
    found = Padding(name="t", dims=[128, 80], dtypes=["float16"], rule="256", says=0.03).find({}, ALPHA)
    assert found.outcome == FAILS and found.value == pytest.approx(0.3) and "in 1 of 2 rows" in found.text
    assert found.table[1]["bytes"] == "160 → 256" and found.table[1]["more"] == "+60%"
    assert Padding(name="t", dims=[128, 256], dtypes=["float16"], rule="256", says=0.0).find({}, ALPHA).outcome == HOLDS


class Told(timed.Timed, frozen=True, kw_only=True):
    """Programs that take what they are told to."""

    seconds: list[tuple[float, float]]

    def programs(self):
        rng = np.random.default_rng(0)
        of = lambda label, mean: timed.Program(label, lambda: mean * math.exp(rng.normal(0, 0.2)), 10**9)
        return [(of("slow", slow), of("fast", fast)) for slow, fast in self.seconds]


@pytest.mark.parametrize("seconds, more_than, outcome", [
    ([(3.0, 1.0)], 2.0, HOLDS), ([(1.0, 3.0)], 1.0, FAILS), ([(1.0, 1.0)], 1.0, OPEN), ([(4.0, 1.0), (1.0, 1.0)], 1.5, HOLDS),
])  # fmt: skip
def test_ratios_of_rounds(seconds, more_than, outcome):
    found = Told(name="t", seconds=seconds, more_than=more_than).find({}, ALPHA)
    wanted = math.prod(slow / fast for slow, fast in seconds) ** (1 / len(seconds))
    assert found.outcome == outcome and found.low < wanted < found.high and found.value == pytest.approx(wanted, rel=0.2)
    assert ("leave it open" in found.text) == (outcome == OPEN) and len(found.table) == 2 * len(seconds)


def test_few_rounds_say_nothing():
    found = Told(name="t", seconds=[(9.0, 1.0)], more_than=1.0, repeats=3).find({}, 0.01)
    assert found.outcome == OPEN and found.low == -math.inf and found.high == math.inf


@pytest.mark.parametrize("test", [
    ReadTime(name="t", layout="bicl_64", against="token_major", others=["head_major"], reads=SMALL, repeats=7),
    RowTime(name="t", dims=[80], tokens=512, kv_heads=1, queries=1, repeats=7),
    ProductTime(name="t", layout="bicl_32", against="token_major", tokens=128, head_dim=64, kv_heads=1, repeats=7),
    StepTime(name="t", dims="layers=1,kv_heads=1,head_dim=64", tokens=64, queries=1, repeats=7,
             against={}, policy={"policy": {"layout": "page_major"}}),
], ids=lambda test: type(test).__name__)  # fmt: skip
def test_what_the_clock_is_asked(test):
    found = test.find({}, ALPHA)
    assert found.kind == "timed" and found.items == 7 and 0 < found.low <= found.value <= found.high
    assert all(float(row["median ms"]) > 0 and float(row["useful GB/s"]) > 0 for row in found.table)


def test_policies_of_a_step_differ_by_layer():
    test = StepTime(name="t", dims="layers=3,kv_heads=1,head_dim=64", policy={}, against={})
    made = test.policies({"policy": {}, "layers": [{"range": [0, 1], "policy": {"layout": "page_major"}}]})
    assert [type(each.layout).__name__ for each in made] == ["PageMajor", "PageMajor", "Contiguous"]
    with pytest.raises(ConfigError, match="unknown key 'layer'"):
        test.policies({"layer": []})


def test_tiles_by_layer_change_no_answer():
    """A layer reads back the same codes bit for bit, whatever its tile; what attention makes of them differs by rounding."""
    key, value, query = np.random.default_rng(0).normal(size=(3, 1, 1, 128, 64)).astype(np.float32)
    record, last = Record(key, value, jnp.arange(128)[None]), jnp.full(1, 127)
    test = StepTime(name="t", dims="layers=1,kv_heads=1,head_dim=64", policy={}, against={})
    bicl = lambda tile: {"layout": {"name": "bicl", "tile": tile}}

    @jax.jit
    def decoded(policies):
        cache = policies[0].fill(record, 128)
        return policies[0].layout.slice(cache.memory, 0, 2), policies[0].attend(cache, query[:, :, :1], last, SPEC).out_BHQD

    mixed = {"policy": bicl(64), "layers": [{"range": [0, 0], "policy": bicl(32)}]}
    large, small = test.policies({"policy": bicl(64)}), test.policies(mixed)
    assert (large[0].layout.tile, small[0].layout.tile) == (64, 32)
    (code, out), (mixed_code, mixed_out) = decoded(large), decoded(small)
    assert all((code[side]["x"] == mixed_code[side]["x"]).all() for side in "kv") and np.abs(out).max() > 0.1
    np.testing.assert_allclose(mixed_out, out, atol=1e-6)


def test_what_rows_are_refused():
    with pytest.raises(ConfigError, match=r"rows of \[64\] numbers need no padding in float32"):
        RowTime(name="t", dims=[64, 80])
    with pytest.raises(ConfigError, match="multiples of 512"):
        RowTime(name="t", dims=[80], tokens=100)


def test_a_table_of_a_finding_stands_on_the_page():
    kept = {
        "findings": [
            {"name": "a", "decides": True, "text": "b", "outcome": "holds", "kind": "timed", "table": [{"x": "1|2", "y": "3"}]}
        ]
    }
    kept |= {"alpha": 0.05, "policies": {}}
    assert "intervals of 90.0%, by round" in page._table(kept)
    assert "\na:\n\n| x | y |\n|---|---|\n| 1\\|2 | 3 |\n" in page._table(kept)
