"""Frames of results: what ties their rows together, pairs with the full cache, which tokens survived."""

import numpy as np
import pandas as pd
import pytest

import kvlab
from kvlab.errors import ResultsError
from kvlab.evaluate import verdict
from kvlab.experiment import survivors
from kvlab.experiment.config import Cell

SWEEP = {
    "name": "sweep",
    "question": "Do the tables fit together?",
    "base": {"model": {"name": "tiny-recall"}, "task": {"name": "mqar", "pairs": 6, "queries": 6, "contexts": 2}},
    "grid": {
        "task.length": [96, 128],
        "policy": [{"label": "all of it"}, {"label": "half", "retention": {"name": "random", "ratio": 0.5}}],
    },
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return kvlab.run(SWEEP, out=out).set_index("policy"), out / "sweep"


def test_every_table_says_whose_its_rows_are(sweep):
    names = ["run_id", "group", "model", "policy", "full", "task", "length", "seed"]
    tables = {name: kvlab.results.load(sweep[1], name) for name in ("cells", "samples", "kept", "entropy")}
    whose = [table[names].drop_duplicates().sort_values("run_id").reset_index(drop=True) for table in tables.values()]
    assert len(whose[0]) == 4 and all(other.equals(whose[0]) for other in whose[1:])
    assert set(whose[0].groupby("group")["length"].nunique()) == {1} and sorted(whose[0]["length"].unique()) == [96, 128]
    assert (whose[0]["full"] == (whose[0]["policy"] == "all of it")).all()


def test_entropies_are_those_of_the_samples(sweep):
    entropy, samples = (kvlab.results.load(sweep[1], name) for name in ("entropy", "samples"))
    assert len(entropy) == sum(x.size for x in samples["entropy"]) == 48 * 2 * 2 * 2
    sample = samples[(samples["policy"] == "half") & (samples["batch"] == 1) & (samples["sample"] == 4)].iloc[0]
    mine = entropy[(entropy["run_id"] == sample["run_id"]) & (entropy["batch"] == 1) & (entropy["sample"] == 4)]
    for row in mine.itertuples():
        step = list(sample["entropy_steps"]).index(row.step)
        assert row.entropy == pytest.approx(sample["entropy"][step, row.layer, row.kv_head, row.query_head])


def test_pairs_give_the_verdict_of_the_run(sweep):
    frame, folder = sweep
    both = kvlab.results.paired(kvlab.results.load(folder))
    half = both[both["policy"] == "half"]
    assert len(both) == 48 and (both["key"] == both["key_full"]).all() and both["full_full"].all()
    found = verdict.binary(half["correct"], half["correct_full"], 0.01, kvlab.results.clusters(half))
    assert found.clusters == 2 and found.difference < 0
    mine = (found.difference, found.low, found.high)
    there = frame.loc["half", ["accuracy_difference", "accuracy_difference_low", "accuracy_difference_high"]]
    assert mine == pytest.approx(tuple(there))


def test_entropies_are_paired_head_by_head(sweep):
    entropy = kvlab.results.load(sweep[1], "entropy")
    both = kvlab.results.paired(entropy)
    assert len(both) == len(entropy)
    same = both[both["full"]]
    assert (same["entropy"] == same["entropy_full"]).all() and not both["entropy"].equals(both["entropy_full"])


def test_without_a_full_cache_there_is_nothing_to_pair_with():
    rows = pd.DataFrame({"group": ["a"], "batch": [0], "sample": [0], "full": [False]})
    with pytest.raises(ResultsError, match='label = "full"'):
        kvlab.results.paired(rows)


def test_rows_without_a_context_count_by_batch():
    rows = pd.DataFrame({"seed": [0, 0, 1], "batch": [7, 8, 7], "context": [3, np.nan, 3]}).assign(model="m", task="needle")
    assert kvlab.results.clusters(rows) == [("m", "needle", 0, 3), ("m", "needle", 0, 8), ("m", "needle", 1, 3)]
    assert [key[-1] for key in kvlab.results.clusters(rows.drop(columns="context"))] == [7, 8, 7]


def test_results_of_parts_that_are_not_at_hand_can_be_read():
    about = kvlab.results.about
    mine = about(Cell({"name": "m"}, {"name": "needle"}, {"retention": "no.such:Part"}))
    assert mine["full"] is False and mine["policy"] and mine["length"] is None
    assert about(Cell({"name": "m"}, {"name": "needle"}))["length"] == 2048  # the task's own default


def test_survivors_as_a_mask_and_as_text(sweep):
    samples = kvlab.results.load(sweep[1])
    half = samples[(samples["policy"] == "half") & (samples["length"] == 96)].iloc[0]
    mask = survivors.held(half)
    assert mask.shape == (2, 2, 96) and (mask.sum(-1) == 48).all()
    assert [half["prompt_tokens"][i] for i in np.flatnonzero(mask[1, 0])] == list(half["kept_tokens"][1][0])
    sample = {"prompt_tokens": ["a", " bc", "\n"], "kept_positions": [[np.array([0, 1]), np.array([1])]]}
    assert survivors.held(sample).tolist() == [[[True, True, False], [False, True, False]]]
    first, second = survivors.coloured(sample, width=2).split("\n")
    assert first == "\x1b[30;48;5;157m a▒\x1b[0m\x1b[30;48;5;83mbc█\x1b[0m" and second == "\x1b[30;48;5;231m ⏎ \x1b[0m"
    assert survivors.coloured(sample, 1, 2) == "\x1b[30;48;5;83mbc█\x1b[0m"
