"""Heads with unequal budgets in one pool, rows that share pages: against numpy, against plain layouts, and in bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvlab import loop, memory
from kvlab.codec import KV, Int8, Raw
from kvlab.core import EMPTY, PAGE, part
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import Contiguous, Paged, PageMajor
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import AdaKV, DuoAttention, HeadBudgets, KeepAll, Window
from kvlab.retention.head_budgets import KEPT
from kvlab.retention.sized import Sized
from kvlab.selection import Quest, ReadAll
from kvlab.testing import contract
from tests import tools

pytestmark = pytest.mark.compiled_quickly

HEADS = 3


@part
class Loud(Sized):
    """Long keys stay, and those of later heads are longer: heads that want unequal shares."""

    def score(self, key, value, pos):
        return jnp.linalg.norm(key, axis=-1) * (1 + jnp.arange(key.shape[1])[:, None])

    def fresh(self, key, value, pos):
        return jnp.linalg.norm(key, axis=-1)

    def priority(self, state, pos, now):
        return jnp.where(pos == now, jnp.inf, state)


@part
class LoudAnew(Loud):
    renews = True

    def score(self, key, value, pos):
        return jnp.linalg.norm(key, axis=-1)


def sequence():
    return tools.sequence(lengths=(280, 197), bucket=320, steps=140, H=HEADS)


def filled(policy, s, budget=100):
    return loop.fill(policy, s.record, budget, int(loop.pages(policy, s.record, budget).max()))


def shares(s, row, budget, safeguard=0.2):
    """Tokens that each head keeps and which, by a loop: AdaKV's algorithm over `Loud`."""
    length = s.lengths[row]
    score = np.linalg.norm(s.key[row, :, :length], axis=-1) * (1 + np.arange(HEADS))[:, None]
    score[:, length - 1] = np.inf
    kept = [set(np.argsort(-head)[: int(safeguard * budget)]) for head in score]
    for flat in np.argsort(-score, axis=None):
        if sum(map(len, kept)) == HEADS * budget:
            break
        kept[flat // length].add(flat % length)
    return kept


def own(cache, row, head):
    """Positions in the pages that are a head's."""
    first, last = np.asarray(cache.bounds)[row, head : head + 2]
    return np.asarray(cache.pos)[row, 0, first:last]


def test_heads_share_one_budget_as_the_rule_says():
    s = sequence()
    policy = Policy(AdaKV(Loud(size=100)), Raw(), Contiguous(), ReadAll())
    cache = filled(policy, s)
    for row in range(2):
        want = shares(s, row, 100)
        got = [set(page[page >= 0].tolist()) for page in (own(cache, row, head) for head in range(HEADS))]
        assert got == want and len(set(map(len, got))) > 1
    assert memory.stored((cache,))[0].sum(-1).tolist() == [300, 300]


def test_memory_is_the_sum_of_what_heads_keep_in_pages():
    """Two pages at least, for the open one must stay; a row has as many pages as the one that needs most."""
    s = sequence()
    for codec in (Raw(), Int8("channel")):
        policy = Policy(AdaKV(Loud(size=100)), codec, Contiguous(), ReadAll())
        cache = filled(policy, s)
        pages = max(sum(max(-(-len(head) // PAGE), 2) for head in shares(s, row, 100)) for row in range(2))
        of_page = 2 * codec.page_bytes(32) + PAGE * memory.POSITION + PAGE * 4  # codes, positions, the retention's scores
        counters = memory.resident((cache.opened, cache.waiting, cache.offset, cache.lost, cache.bounds, cache.tail))
        assert memory.resident(cache) == 2 * pages * of_page + counters
        assert pages < HEADS * 5  # as many as the largest share would take in every head


def test_budgets_by_head_are_those_of_the_profile():
    """Between two measured shares they are interpolated; a head's own lowest scores go; other heads' do not matter."""
    s, table = sequence(), np.array([[0.1, 0.2, 0.07], [0.2, 0.4, 0.15], [0.3, 0.9, 0.3], [0.5, 1.0, 0.75]], np.float32)
    policy = Policy(HeadBudgets(Loud(size=100), share_KH=jnp.asarray(table)), Raw(), Contiguous(), ReadAll())
    cache, tokens = filled(policy, s), int(max(s.lengths))
    low, high = next((i - 1, i) for i, x in enumerate(KEPT) if x > 100 / tokens)
    part = (100 / tokens - KEPT[low]) / (KEPT[high] - KEPT[low])
    want = np.round((table[low] + part * (table[high] - table[low])) * tokens)
    for row, length in enumerate(s.lengths):
        score = np.linalg.norm(s.key[row, :, :length], axis=-1) * (1 + np.arange(HEADS))[:, None]
        score[:, length - 1] = np.inf
        for head in range(HEADS):
            page = own(cache, row, head)
            assert set(page[page >= 0].tolist()) == set(np.argsort(-score[head])[: int(want[head])].tolist())


def test_budgets_by_head_come_from_a_calibration():
    shape = ModelConfig(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=64, context=8192)
    made = [HeadBudgets(Loud(size=100), "smollm2-135m").at(layer, shape) for layer in range(30)]
    assert made[3].at(3, shape) == made[3] or made[3].at(3, shape).share_KH is made[3].share_KH
    shares = np.stack([part.share_KH for part in made])
    np.testing.assert_allclose(shares.mean((0, 2)), KEPT, atol=2e-3)
    assert (np.diff(shares, axis=1) >= -1e-6).all() and shares[:, 2].max() > 0.95 and shares[:, 2].min() < 0.2
    with pytest.raises(ConfigError, match="calibration '': no such file"):
        HeadBudgets(Loud(size=100)).at(0, shape)


@pytest.mark.parametrize(
    "inner,codec,layout",
    [(Loud, Raw(), Contiguous()), (LoudAnew, Int8("channel"), PageMajor()), (Loud, KV(Int8("channel"), Int8()), Paged())],
    ids=["raw", "renewed", "paged"],
)
def test_a_pool_equals_dense_attention_over_what_it_holds(inner, codec, layout):
    s = sequence()
    policy = Policy(AdaKV(inner(size=100)), codec, layout, ReadAll())
    first = filled(policy, s)
    key, value = tools.appended(s)
    last, seen = tools.decode(policy, first, key, value, jnp.asarray(s.query), jnp.asarray(s.lengths), s.spec)
    assert memory.resident(first) == memory.resident(last)
    held = memory.stored((last,))[0]
    assert (held <= np.diff(first.bounds) * PAGE).all() and (held > PAGE).all()
    for step in (0, 1, 60, 139):
        for row, head in np.ndindex(2, HEADS):
            begin, end = np.asarray(first.bounds)[row, head : head + 2]
            now, got = s.lengths[row] + step, np.asarray(seen["out"])[step, row, head]
            pos = np.asarray(seen["pos"])[step, row, 0, begin:end]
            assert now in pos and len(np.unique(pos[pos >= 0])) == (pos >= 0).sum()
            raw = np.isin(np.arange(begin, end), np.asarray(seen["waiting"])[step, row, head]) & policy.tailed
            np.testing.assert_allclose(got, dense(s, policy, (step, row, head), pos, raw), atol=1e-5)


def dense(s, policy, at, pos, raw):
    """Attention in numpy over what a head's pages hold."""
    step, row, head = at
    both = []
    for codec, x in ((policy.codec.keys, s.key), (policy.codec.values, s.value)):
        rows = [np.where((page >= 0)[:, None], x[row, head, np.maximum(page, 0)], 0).astype(np.float32) for page in pos]
        rows = [one if exact else tools.through(codec, one, page) for one, exact, page in zip(rows, raw, pos)]
        both.append(np.concatenate(rows)[(pos >= 0).reshape(-1)])
    logits = s.query[step, row, head] @ both[0].T * s.spec.scale
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ both[1]


def test_a_pool_is_cut_back_and_forked():
    s = sequence()
    policy = Policy(AdaKV(Loud(ratio=0.0)), Raw(), Contiguous(), ReadAll())
    cache = policy.fill(s.record, 320, int(policy.pages(s.record, 320).max()))
    key, value = tools.appended(s)
    pos = jnp.asarray(s.lengths + np.arange(30)[:, None])
    longer = tools.append(policy, cache, key[:30], value[:30], pos)
    cut = tools.truncate(policy, longer, jnp.asarray(s.lengths))
    attend = lambda c, rows: policy.attend(c, jnp.asarray(s.query)[0][rows], jnp.asarray(s.lengths)[rows] - 1, s.spec).out_BHQD
    both = np.array([0, 1])
    np.testing.assert_allclose(attend(cut, both), attend(cache, both), atol=1e-5)
    forked = np.array([1, 0, 1])
    np.testing.assert_array_equal(attend(tools.rows(policy, cut, forked), forked), attend(cut, both)[forked])


def test_streaming_heads_see_their_window_and_full_heads_everything(tmp_path):
    """DuoAttention: outputs by head, to the token; pages only for what each head may see; the ranking of the whole model."""
    s = sequence()
    duo = DuoAttention(sinks=4, recent=70, full_H=jnp.array([False, True, False]))
    policy = Policy(duo, Int8("channel"), PageMajor(), ReadAll())
    contract.lives("duo", policy, dataclasses.replace(s, steps=contract.STEPS, query=s.query[: contract.STEPS]))
    cache = policy.fill(s.record, policy.budget(280, 420), int(policy.pages(s.record, policy.budget(280, 420)).max()))
    assert np.diff(cache.bounds)[0].tolist() == [4, 7, 4]
    visible = [sorted(x[x >= 0].tolist()) for x in np.asarray(memory.positions(policy, cache))[0].reshape(HEADS, -1)]
    assert visible[0] == visible[2] == [*range(4), *range(210, 280)] and visible[1] == list(range(280))
    save_file({"profile": np.array([[0.1, 0.5], [0.4, 0.2]], np.float32)}, tmp_path / "p.safetensors")
    shape = ModelConfig(layers=2, hidden=16, ffn=16, heads=4, kv_heads=2, head_dim=8, vocab=8, context=64)
    of = lambda share, layer: DuoAttention(str(tmp_path / "p.safetensors"), share).at(layer, shape).full_H.tolist()
    full = [of(share, layer) for share in (0.5, 0.8) for layer in (0, 1)]
    assert full == [[False, True], [True, False], [False, True], [True, True]]


def test_what_a_pool_cannot_do_is_refused():
    with pytest.raises(RefusedPolicy, match="pages lie in one pool, which .*Quest.* cannot read from; use read_all"):
        Policy(AdaKV(Loud(size=100)), Raw(), Contiguous(), Quest())


# ------------------------------------------------------------------------------------------------------------ shared pages


@pytest.mark.parametrize("codec", [Raw(), Int8("channel")], ids=str)
def test_rows_that_share_a_prompt_share_its_pages_and_differ_afterwards(codec):
    s = sequence()
    policy, plain = (Policy(KeepAll(), codec, layout, ReadAll()) for layout in (Paged(), PageMajor()))
    cache, want = (p.fill(s.record, p.budget(280, 420)) for p in (policy, plain))
    assert memory.resident(cache) == memory.expected(policy, 2, HEADS, 32, cache.budget)
    rows = np.array([0, 0, 1, 0, 1, 0, 0, 0])
    forked, copied = loop.pick_rows((policy,), (cache,), rows, 64)[0], plain.rows(want, rows)
    prompt = HEADS * (4 + 3)  # committed pages of 280 and 197 tokens
    assert len(forked.memory["v"]["x"]) == prompt + len(rows) * HEADS * 2
    assert memory.resident(forked.memory) < 0.5 * memory.resident(copied.memory)
    key, value = (x[:64, rows] * (1 + jnp.arange(8) / 8)[:, None, None] for x in tools.appended(s))
    args = key, value, jnp.asarray(s.query)[:64, rows], jnp.asarray(s.lengths)[rows], s.spec
    last, seen = tools.decode(policy, forked, *args)
    _, other = tools.decode(plain, copied, *args)
    np.testing.assert_allclose(seen["out"], other["out"], atol=1e-5)
    named = np.asarray(last.memory["table"])
    mine = [set(named[row][named[row] >= 0].tolist()) for row in range(8)]
    assert len(mine[0] & mine[1]) == HEADS * 4 and mine[0] - mine[1], "the prompt's pages are shared, what came after is not"


def test_room_ends_where_shared_pages_do():
    s = sequence()
    policy = Policy(KeepAll(), Int8("channel"), Paged(), ReadAll())
    cache = policy.fill(s.record, policy.budget(280, 420))
    forked = loop.pick_rows((policy,), (cache,), np.array([0, 0, 0]), 64)[0]
    room = np.asarray(policy.room(forked)).min()
    assert 64 <= room <= 64 + 2 * PAGE
    cut = tools.truncate(policy, forked, jnp.full(3, 100))
    assert (np.asarray(cut.memory["table"]) >= 0).sum() == 3 * HEADS * 2 and (np.asarray(cut.pos) >= 0).sum() == 900
    assert np.asarray(policy.room(cut)).min() < 420 - 100, "pages that other rows may still name are not counted twice"


def test_committed_pages_never_change_when_rows_part():
    s = sequence()
    policy = Policy(Window(130, 4), Int8("channel"), Paged(), ReadAll())
    cache = policy.fill(s.record, policy.budget(280, 420))
    forked = loop.pick_rows((policy,), (cache,), np.array([0, 0]), 140)[0]
    key, value = (x[:, np.array([0, 0])] for x in tools.appended(s))
    pos = jnp.asarray(s.lengths[[0, 0]] + np.arange(140)[:, None])
    before = jax.tree.map(np.asarray, tools.codes(policy, forked, forked.pos.shape[2]))
    after = tools.append(policy, forked, key, value, pos, jnp.array([True, False]))
    codes = jax.tree.map(np.asarray, tools.codes(policy, after, forked.pos.shape[2]))
    held = np.asarray(forked.memory["table"])[1] >= 0
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1][held], b[1][held]), before, codes)
    assert (np.asarray(after.pos)[0] != np.asarray(forked.pos)[0]).any()
    assert (np.asarray(after.pos)[1] == np.asarray(forked.pos)[1]).all() and EMPTY in np.asarray(after.pos)
