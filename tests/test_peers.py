"""What retentions keep, beside kvpress (marked `peers`: they need the extra), and where kvpress does what kvlab does not."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import parts
from kvlab.bench import parity, presses, reasons
from kvlab.core import Record, kept
from kvlab.decode import Engine
from kvlab.loop import fill

METHODS = [m for m in parity.METHODS if parity.known(m)]


def peers(test):
    """Needs the extra; what torch and kvpress warn of on the way is theirs."""
    return pytest.mark.peers(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A random Llama on both sides after 300 tokens."""
    folder = tmp_path_factory.mktemp("peers")
    presses.tiny("Llama", folder)
    ids = lambda model: np.random.default_rng(0).integers(0, 256, 300).tolist()
    return parity.prepare("tiny-llama", str(folder), ids, METHODS, folder / "filters.safetensors")


@peers
@pytest.mark.parametrize("method", METHODS)
def test_keeps_what_kvpress_keeps(case, method):
    """At each ratio the same tokens in every layer and head, or a difference whose reason holds."""
    rows = [parity.compare(method, ratio, case) for ratio in parity.RATIOS]
    assert all(row["agree"] or row["reason"] for row in rows), rows
    assert any(row["agree"] for row in rows) or method in ("chunkkv(key_norm)", "kvzip")


@peers
def test_a_wrong_token_is_not_explained(case, monkeypatch):
    right = parity.ours
    monkeypatch.setattr(parity, "ours", lambda *args: np.roll(right(*args), 1, -1))
    rows = [parity.compare(method, 0.5, case) for method in METHODS if method != "lagkv"]  # its scores tie over a whole tail
    assert rows and not any(row["agree"] or row["reason"] for row in rows), rows


def test_a_tie_is_one_at_the_cut_only():
    scores = np.array([[5.0, 3.0, 2.0 + 1e-6, 2.0, 1.0]])
    mask = lambda *kept: np.isin(np.arange(5), kept)[None]
    assert "1 of 1 heads" in reasons.tie(mask(0, 1, 3), mask(0, 1, 2), scores)
    assert not reasons.tie(mask(0, 1, 4), mask(0, 1, 2), scores)  # the least is no tie
    assert not reasons.tie(mask(1, 2, 3), mask(0, 1, 2), scores)  # neither is the best, which went
    assert not reasons.tie(mask(0, 1, 2, 3), mask(0, 1, 2), scores)  # nor one token more
    signed = np.array([[5.0, 3.0, 1e-6, -1e-6, -2.0]])  # about nothing: it is the others that say what is near
    assert reasons.tie(mask(0, 1, 3), mask(0, 1, 2), signed)
    assert not reasons.tie(mask(0, 1, 3), mask(0, 1, 2), np.abs(signed) * [1, 1, 9, 1, 1])  # all of one sign: 9e-6 is not 1e-6


def test_whole_chunks_are_a_reason_only_for_what_they_give():
    """Three chunks of 20 and half of one, ratio 0.5: two whole ones against 35 tokens, 15 of them the next chunk's newest."""
    scores = np.repeat([1.0, 9.0, 5.0, 7.0], [20, 20, 20, 10])[None, None]
    position = np.arange(70)
    theirs = ((position >= 20) & (position < 40)) | (position >= 60)
    ours = theirs | ((position >= 55) & (position < 60))
    pair = lambda ours: reasons.Pair(None, 0.5, ours[None, None], theirs[None, None], scores)
    assert "2 whole chunks" in reasons.chunks(pair(ours))
    assert not reasons.chunks(pair(theirs | ((position >= 54) & (position < 59))))


def test_a_tie_in_the_first_half_explains_only_what_follows_of_it():
    """Six tokens, three kept: one by its norm, where two are tied, and the others by norm times weight."""
    norm, weight = np.array([1.0, 1.0 + 1e-7, 4, 5, 6, 7]), np.array([9.0, 9.0, 1, 2, 3, 4])
    record = types.SimpleNamespace(key_BHTD=norm.reshape(1, 1, -1, 1), seen={"output_norm": weight.reshape(1, 1, -1)})
    case = types.SimpleNamespace(ours=types.SimpleNamespace(records=[record]))
    mask = lambda *kept: np.isin(np.arange(6), kept)[None, None]
    pair = lambda *kept: reasons.Pair(case, 0.5, mask(*kept), mask(0, 1, 2), None)
    assert "in 1 of 1 heads" in reasons.halves(pair(0, 2, 1)) and "in 1 of 1 heads" in reasons.halves(pair(1, 2, 3))
    assert not reasons.halves(pair(0, 1, 3)) and not reasons.halves(pair(0, 2, 5))


def test_the_table_counts_agreement_and_says_why_not():
    row = {"method": "tova", "model": "tiny", "ratio": 0.5, "agree": True, "reason": ""}
    rows = [row, {**row, "agree": False, "reason": "ties"}, {**row, "agree": False}]
    assert parity.as_markdown(rows).splitlines()[2] == "| tova | 1 of 3 | ties; not explained |"


# ------------------------------------------------------------------------------------------- where the two differ on purpose


def prompt(length: int, dim: int = 4, seed: int = 0):
    """Random keys and values of one head `[1, 1, T, D]`."""
    draw = np.random.default_rng(seed).standard_normal((2, 1, 1, length, dim))
    return draw.astype(np.float32)


def held(table, key, value):
    """Positions that kvlab keeps of a prompt's keys and values."""
    policy, length = parts.policy({"retention": table}), key.shape[2]
    record = Record(jnp.asarray(key), jnp.asarray(value), jnp.arange(length)[None])
    pos = np.asarray(fill(policy, record, policy.budget(length, length)).pos)
    return sorted(pos[pos >= 0].tolist())


def pressed(press, key, value):
    """Positions that kvpress keeps of the same."""
    import torch

    module = types.SimpleNamespace(head_dim=key.shape[-1])
    some = press.compress(module, torch.zeros(1, key.shape[2], 1), torch.tensor(key), torch.tensor(value), None, {})[0]
    return np.flatnonzero(presses._found(torch.tensor(key[0, 0]), some[0, 0])).tolist()


@peers
def test_a_tenth_of_a_hundred_is_ten():
    """CASES 1: 100 · (1 − 0.9) is a little less than 10 in floating point; kvpress keeps 9."""
    from kvpress import KnormPress

    key, value = prompt(100)
    assert len(pressed(KnormPress(0.9), key, value)) == 9
    assert len(held({"name": "key_norm", "ratio": 0.9, "unit": 1}, key, value)) == 10 == kept(100, 0.9)


@peers
def test_sinks_lose_no_tie():
    """CASES 2: LagKV gives the sinks and its long tail one score; which of them stay is up to kvpress's top-k."""
    from kvpress import LagKVPress

    key, value = prompt(300)
    assert held({"name": "lagkv", "ratio": 0.75, "unit": 1}, key, value)[:4] == [0, 1, 2, 3]
    assert pressed(LagKVPress(0.75), key, value)[:4] != [0, 1, 2, 3]


@peers
def test_a_window_always_holds_the_newest():
    """CASES 3: with room for fewer tokens than sinks, kvpress keeps sinks only; here a window comes beside the sinks."""
    from kvpress import StreamingLLMPress

    key, value = prompt(8)
    assert set(pressed(StreamingLLMPress(0.75), key, value)) <= {0, 1, 2, 3}
    assert held({"name": "window", "size": 1, "sinks": 4}, key, value) == [0, 1, 2, 3, 7]


@peers
def test_a_prompt_shorter_than_the_window_is_kept(case):
    """CASES 6: 20 tokens, a window of 64: kvpress refuses the prompt."""
    from kvpress import SnapKVPress

    short = presses.prefill(case.model.name, case.theirs.ids[:20])
    with pytest.raises(AssertionError, match="should be greater than the window size"):
        presses.kept(SnapKVPress(0.5), short, False)
    prompt = Engine(case.model).prefill([case.theirs.ids[:20]], {"queries"})
    policy = parts.policy({"retention": {"name": "snapkv", "size": 20, "unit": 1}})
    pos = np.asarray(fill(policy.at(0, case.model.config), prompt.records[0], 20).pos)
    assert sorted(pos[0, 0][pos[0, 0] >= 0].tolist()) == list(range(20))


@peers
def test_queries_of_a_chunk_are_rotated_at_their_own_positions(case):
    """CASES 7: the first of four chunks is what the prompt of that chunk alone gives. kvpress turns its queries to the end."""
    from kvpress import ChunkPress, SnapKVPress

    ids = case.theirs.ids[:256]
    make = lambda: SnapKVPress(0.5, window_size=8, kernel_size=1)
    alone, _ = presses.kept(make(), presses.prefill(case.model.name, ids[:64]), False)
    chunked, _ = presses.kept(ChunkPress(make(), 64), presses.prefill(case.model.name, ids), False)
    assert (alone[0] != chunked[0, :, :64]).any()
    prompt = Engine(case.model).prefill([ids[:64]], {"queries"})
    policy = parts.policy({"retention": {"name": "snapkv", "ratio": 0.5, "unit": 1, "window": 8, "kernel": 1}})
    pos = np.asarray(fill(policy.at(0, case.model.config), prompt.records[0], 32).pos)[0]
    for head, mask in zip(pos.reshape(len(pos), -1), alone[0]):
        assert sorted(head[head >= 0].tolist()) == np.flatnonzero(mask).tolist()
