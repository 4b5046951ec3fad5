"""The contract kit: what keeps the contract passes, what breaks it is told how; every registered part with every other."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.codec import Fp8, Int8, Raw
from kvlab.core import PAGE, Pages, Retention, Selection, Tokens, part, static
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import Contiguous, PageMajor
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll
from kvlab.testing import Breach, check, contract, examples
from tests.my_rule import EveryThird

pytestmark = pytest.mark.compiled_quickly

PARTS = examples.examples(contract.SHAPE)
NAMES = {kind: list(parts) for kind, parts in PARTS.items()}


@pytest.fixture(scope="module")
def s():
    return contract._sequence(contract.SHAPE)


@pytest.mark.parametrize("kept", [EveryThird(size=96), pytest.param(Fp8(), marks=pytest.mark.slow)], ids=str)
def test_a_sound_part_passes(kept):
    report = check(kept)
    assert report.products + len(report.refused) == (36 if isinstance(kept, Retention) else 48)
    assert len(report.passed) == 3 and str(report).startswith(str(kept))
    assert (report.error is None) == isinstance(kept, Retention) and (report.error or 0) < 0.04


@pytest.mark.parametrize("retention", NAMES["retention"])
def test_every_pair_of_parts_has_the_shapes_it_promises_or_a_reason(retention, s):
    """A covering array by shape: each retention with each codec, layout and selection, which meet each other as well."""
    i = NAMES["retention"].index(retention)
    seen = set()
    for j, codec in enumerate(NAMES["codec"]):
        names = retention, codec, NAMES["layout"][(i // 2 + j) % 4], NAMES["selection"][(i + j) % len(NAMES["selection"])]
        for selection in dict.fromkeys((names[3], "read_all")):
            try:
                policy = Policy(*(PARTS[kind][name] for kind, name in zip(PARTS, (*names[:3], selection))))
            except RefusedPolicy as error:
                assert examples._reason(str(error))
                continue
            contract._shapes(str(names), policy, s)
            seen.add(codec)
            break
    assert len(seen) > 3


@pytest.mark.slow
@pytest.mark.parametrize("retention", NAMES["retention"])
def test_the_whole_product_has_the_shapes_it_promises_or_a_reason(retention, s):
    for codec in PARTS["codec"].values():
        for layout in PARTS["layout"].values():
            for selection in PARTS["selection"].values():
                try:
                    policy = Policy(PARTS["retention"][retention], codec, layout, selection)
                except RefusedPolicy as error:
                    assert examples._reason(str(error))
                else:
                    contract._shapes(retention, policy, s)


def test_the_table_of_refusals_is_the_one_in_the_documentation():
    text = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
    told = re.search("<!-- refused -->\n(.*?)\n<!-- /refused -->", text, re.S)
    assert told and told[1] == examples.table(contract.SHAPE), "run `python -m kvlab.testing` and put its output there"


# ------------------------------------------------------------------------------------------------------------- breaches


@part
class Fickle(EveryThird):
    """Draws lots anew every time."""

    def priority(self, state, pos, now):
        return jnp.asarray(np.random.default_rng().standard_normal(pos.shape), jnp.float32)


@part
class Forgetful(EveryThird):
    """Lets the newest token go."""

    def budget(self, prompt, total, unit):
        return 96

    def priority(self, state, pos, now):
        return -pos


@part
class Understated(Int8):
    def page_bytes(self, dim):
        return PAGE * dim


@part
class Brittle(Raw):
    """Divides by the largest number, which may be zero."""

    def encode(self, x_BHNPD, pos_BHNP=None):
        top = jnp.abs(x_BHNPD).max(-1, keepdims=True)
        return {"x": x_BHNPD / top * top}


@part
class Shifted(PageMajor):
    """Reads the page after the one that was asked for."""

    def pages(self, memory, page_BHR):
        return super().pages(memory, page_BHR + 1)


@part
class Twice(Selection):
    def select(self, state, query, visible, cache, around):
        return Pages(jnp.zeros((*visible.shape[:2], 2), jnp.int32))


@part
class Late(Selection):
    """Padding first."""

    def select(self, state, query, visible, cache, around):
        return Tokens(jnp.broadcast_to(jnp.array([-1, 0, 1]), (*visible.shape[:2], 3)))


@part
class Retraced(EveryThird):
    """Holds a figure that is different each time, where it is part of the key."""

    stamp: int = static(default=0)


def lives(s, **parts):
    plain = {"retention": KeepAll(), "codec": Raw(), "layout": Contiguous(), "selection": ReadAll()}
    contract.lives("this", Policy(**{**plain, **parts}), s)


def test_a_rule_that_draws_lots_is_found(s):
    with pytest.raises(Breach, match="kept differently the second time; draw randomness from positions"):
        contract._retention(Policy(Fickle(size=64), Raw(), Contiguous(), ReadAll()), s, contract.Report(None))


def test_a_selection_that_repeats_or_pads_first_is_found(s):
    with pytest.raises(Breach, match="twice"):
        lives(s, selection=Twice())
    with pytest.raises(Breach, match="after a −1"):
        lives(s, selection=Late())


def test_codecs_that_lie_or_break_are_found(s):
    policy = lambda codec: Policy(KeepAll(), codec, Contiguous(), ReadAll())
    with pytest.raises(Breach, match="a page takes 2304 bytes, page_bytes says 2048"):
        contract._codec(policy(Understated()), s, contract.Report(None))
    with pytest.raises(Breach, match="not finite|zeros come back"):
        contract._codec(policy(Brittle()), s, contract.Report(None))


def test_a_layout_that_reads_elsewhere_is_found(s):
    with pytest.raises(Breach, match="pages does not give back what was packed"):
        contract._layout(Policy(KeepAll(), Raw(), Shifted(), ReadAll()), s, contract.Report(None))


def test_a_cache_that_says_one_thing_and_reads_another_is_found(s):
    @part
    class Off(Raw):
        def scores(self, query_BHQD, code, by_page=False, pos_BHNP=None):
            return super().scores(query_BHQD, code, by_page, pos_BHNP) * 1.01

    with pytest.raises(Breach, match="row 0, head 0, step 0: the output differs by .* from dense attention"):
        lives(s, codec=Off())


def test_what_is_no_part_is_refused():
    with pytest.raises(ConfigError, match="is no part; give a retention, a codec, a layout or a selection"):
        check("window")


def test_figures_that_change_a_static_field_are_told_apart():
    """Equal parts share a trace, parts with another static figure do not: what `_one_trace` counts."""
    a, b = (jax.tree.structure(dataclasses.replace(Retraced(size=64), stamp=i)) for i in (0, 1))
    assert a != b and a == jax.tree.structure(Retraced(size=64))
