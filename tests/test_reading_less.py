"""What experiments know of selections: bytes read, the layers where one applies, rankings of layers. On a tiny random model."""

import json

import jax
import numpy as np
import pytest

import kvlab
from kvlab import memory, parts
from kvlab.errors import ConfigError, ResultsError
from kvlab.experiment import config, environment, ranking, reads
from kvlab.experiment.layers import Choice
from tests import tools

pytestmark = pytest.mark.compiled_quickly

TASK = {"name": "likelihood", "length": 300, "contexts": 2, "continuation": 8, "text": "stdlib"}
HALF = {"selection": {"name": "recency", "sparsity": 0.5}}
SMALL = {"name": "less", "question": "?", "base": {"model": {"name": "tiny"}, "task": TASK, "policy": HALF}}


def with_layers(layers, **more):
    return {**SMALL, "base": {**SMALL["base"], "layers": layers}, **more}


@pytest.mark.parametrize(
    "table,bytes_",
    [
        ({}, 100 * 512 + 1000 * 4),
        ({"codec": {"name": "int8", "scale": "token"}}, 100 * (2 * 64 + 2 * 4) + 1000 * 4),
        ({"selection": "quest"}, 100 * 512 + 1000 * (2 * 64 * 4 / 64 + 4)),
        ({"selection": "key_norm"}, 100 * 512 + 1000 * (4 + 4)),
        ({"selection": "oracle"}, 100 * 512 + 1000 * 4),
    ],
)
def test_bytes_read_are_codes_index_keys_and_positions(table, bytes_):
    policy = parts.policy(table)
    assert memory.read_bytes(policy, 64, np.array([100]), np.array([1000])) == bytes_
    assert memory.full_read_bytes(parts.policy({}), 64, 1000) == 1000 * 516


def test_a_run_says_what_its_steps_read(on_tiny, tmp_path):
    """Of two layers of two heads of 16, the second reads half; by hand at the four steps that are looked at."""
    kvlab.run(with_layers({"only": 1}), out=tmp_path)
    length = np.array([301, 303, 306, 308])
    full, half = 2 * length * 132, 2 * ((length + 1) // 2 * 128 + length * 4)
    for _, row in kvlab.results.load(tmp_path / "less").iterrows():
        assert row["read_bytes"] == pytest.approx((full + half).mean())
        assert row["read_ratio"] == pytest.approx((full + half).mean() / (2 * full).mean())
        assert row["read_ratio_gated"] == pytest.approx(half.mean() / full.mean())
        assert row["realised_sparsity"] == pytest.approx(0.5, abs=0.003) and (row["by_share"], row["by_maximum"]) == (1, 0)
    cells = kvlab.results.load(tmp_path / "less", "cells")
    assert cells["read_ratio_gated"].iloc[0] == pytest.approx(half.mean() / full.mean())


def test_the_active_bound_is_counted(on_tiny, tmp_path):
    policies = [{"label": "full"}, {"label": "most", "selection": {"name": "recency", "sparsity": 0.5, "max_k": 40}}]
    frame = kvlab.run({**SMALL, "grid": {"policy": policies}}, out=tmp_path).set_index("policy")
    assert frame.loc["most", "by_maximum"] == 1 and frame.loc["most", "by_share"] == 0
    assert frame.loc["full", "read_ratio"] == 1 and np.isnan(frame.loc["full", "read_ratio_gated"])


def test_the_table_says_what_is_read_where_that_is_less(on_tiny, tmp_path, capsys):
    kvlab.run({**SMALL, "grid": {"policy": [{"label": "full"}]}}, out=tmp_path / "a")
    assert " read " not in capsys.readouterr().out
    kvlab.run(SMALL, out=tmp_path / "b")
    shown = capsys.readouterr().out
    assert " read " in shown and "bytes that a step reads" in " ".join(shown.split())


def test_steps_looked_at_are_spread():
    assert reads.planned(8, 4).tolist() == [0, 2, 5, 7] and reads.planned(1, 4).tolist() == [0]


def test_a_retention_gets_what_it_needs_of_the_prompt(on_tiny, tmp_path):
    rule = {"retention": {"name": "tests.my_rule:LongInputs", "size": 64}}
    frame = kvlab.run({**SMALL, "grid": {"policy": [{"label": "full"}, rule]}}, out=tmp_path)
    assert frame["resident_bytes"].iloc[1] < frame["resident_bytes"].iloc[0] and frame["kl_mean"].iloc[1] > 0


# ---------------------------------------------------------------------------------------------------------- which layers


def sparse(choice, model, policy=HALF):
    made = config.Cell({}, TASK, policy, choice).make_policies(model)
    return [i for i, each in enumerate(made) if not each.selection.reads_all]


def ranking_file(folder, order):
    path = folder / "ranking.json"
    path.write_text(json.dumps({"layers": [{"layer": i} for i in order]}))
    return str(path)


def test_a_choice_says_where_the_selection_applies(tmp_path):
    model = tools.tiny_model(layers=6).config
    assert sparse(Choice(range=(1, 3)), model) == [1, 2, 3]
    assert sparse(Choice(only=4), model) == [4] and sparse(Choice(only=(5, 0)), model) == [0, 5]
    assert sparse(Choice(only=()), model) == []
    path = ranking_file(tmp_path, [5, 0, 3, 2, 1, 4])
    assert sparse(Choice(ranking=path, keep_full=2), model) == [1, 2, 3, 4]
    assert sparse(Choice(ranking=ranking_file(tmp_path, [2, 1]), keep_full=1), model) == [0, 1, 3, 4, 5]


def test_other_parts_stay_where_everything_is_read():
    model = tools.tiny_model(layers=3).config
    made = config.Cell({}, TASK, {**HALF, "codec": "int8"}, Choice(only=1)).make_policies(model)
    assert len({each.codec for each in made}) == 1 and made[0].codec == parts.policy({"codec": "int8"}).codec


def test_layers_with_a_window_are_not_chosen():
    model = tools.tiny_model(layers=4, windows=(32, None, 32, None)).config
    assert sparse(Choice(range=(0, 3)), model) == [1, 3]
    with pytest.raises(ConfigError, match="without a local window, 1, 3"):
        sparse(Choice(only=2), model)


@pytest.mark.parametrize("choice", [Choice(only=0, read=0.6), Choice(range=(0, 1), read=0.6)], ids=["one", "both"])
def test_choices_are_compared_at_equal_bytes(on_tiny, tmp_path, choice):
    """The share holds for the codes; positions, 4 of 132 bytes here, come on top."""
    layers = {"only": 0, "read": 0.6} if choice.only == 0 else {"range": [0, 1], "read": 0.6}
    frame = kvlab.run(with_layers(layers), out=tmp_path)
    assert frame["read_ratio"].iloc[0] == pytest.approx((0.6 * 128 + 4) / 132, abs=0.004)
    assert choice.label in frame["policy"].iloc[0]


@pytest.mark.parametrize("read,layers,gated", [(0.5, 30, 19), (0.35, 30, 30), (0.9, 12, 3), (1.0, 2, 1)])
def test_gated_layers_make_up_for_the_others(read, layers, gated):
    share = memory.gated_share(read, layers, gated)
    assert (layers - gated + gated * share) / layers == pytest.approx(read)


def test_what_full_layers_exceed_by_themselves_is_refused():
    with pytest.raises(ConfigError, match=r"read=0.35 with 19 of 30 layers sparse; allowed: above 0.367"):
        memory.gated_share(0.35, 30, 19)
    with pytest.raises(ConfigError, match="0 of 30 layers"):
        memory.gated_share(0.5, 30, 0)


@pytest.mark.parametrize(
    "layers,message",
    [
        ({"rnge": [0, 1]}, "unknown key 'rnge'; did you mean 'range'"),
        ({}, "exactly one of range"),
        ({"range": [0, 1], "only": 1}, "exactly one of range"),
        ({"only": "3"}, "Expected `int | array | null`, got `str`"),
        ({"from": "ranking.json"}, "from and keep_full go together"),
        ({"only": 1, "keep_full": 8}, "from and keep_full go together"),
        ({"from": "ranking.json", "keep_full": -1}, "keep_full = -1; allowed: 0 and more"),
        ({"only": 1, "read": 1.5}, "read = 1.5; allowed: above 0, up to 1"),
    ],
)
def test_wrong_choices_say_what_is_right(layers, message):
    with pytest.raises(ConfigError, match=message):
        config.expand(config.read(with_layers(layers))[1])


def test_a_choice_needs_a_selection():
    with pytest.raises(ConfigError, match="only 1.*the policy reads everything"):
        config.expand(config.read(with_layers({"only": 1}, grid={"policy": [{"codec": "int8"}]}))[1])
    policy = {"selection": {"name": "recency", "read": 0.5}}
    with pytest.raises(ConfigError, match="are both given"):
        config.expand(config.read(with_layers({"only": 1, "read": 0.6}, grid={"policy": [policy]}))[1])


@pytest.mark.parametrize(
    "content,message",
    [
        ("nonsense", "is no ranking"),
        ('{"layers": [{"layer": 9}]}', r"ranks \[9\]"),
        ('{"layers": [{"layer": 1}]}', "ranks 1 layers"),
    ],
)
def test_wrong_rankings_say_what_is_right(tmp_path, content, message):
    path = tmp_path / "ranking.json"
    path.write_text(content)
    model = tools.tiny_model().config
    with pytest.raises(ConfigError, match=message):
        sparse(Choice(ranking=str(path), keep_full=2), model)
    with pytest.raises(ConfigError, match="is no ranking.*layer_sensitivity"):
        sparse(Choice(ranking=str(tmp_path / "missing.json"), keep_full=2), model)


# ------------------------------------------------------------------------------------------------------------- rankings


def test_layers_are_ranked_by_damage_and_ties_by_number():
    found = {2: [{"kl_mean": 0.1}], 0: [{"kl_mean": 0.1}, {"accuracy": 0.5}], 1: [{"kl_mean": 0.2}, {"kl_mean": 0.6}]}
    rows = ranking.ranked(found)
    assert [row["layer"] for row in rows] == [1, 0, 2] and rows[0]["kl_mean"] == pytest.approx(0.4)
    assert rows[1]["accuracy"] == 0.5 and ranking.ranked({0: [{"accuracy": 1.0}]}) == []


def test_one_layer_at_a_time_leaves_a_ranking_that_another_experiment_uses(on_tiny, tmp_path):
    frame = kvlab.run({**SMALL, "grid": {"layers.only": [[], 0, 1]}}, out=tmp_path).set_index("policy")
    assert frame["kl_mean"].iloc[0] == 0 and frame.index[0] == "full" and frame["nll_verdict"].iloc[0] == "reference"
    path = tmp_path / "less" / "ranking.json"
    about = json.loads(path.read_text())
    damage = {row["layer"]: row["kl_mean"] for row in about["layers"]}
    assert about["model"] == "tiny" and about["policy"] == "recency sparsity 0.5"
    assert damage == {i: frame.loc[f"recency sparsity 0.5 | only {i}", "kl_mean"] for i in (0, 1)}
    again = with_layers({"from": str(path), "keep_full": 1}, name="chosen")
    worst = max(damage, key=damage.__getitem__)
    assert kvlab.run(again, out=tmp_path)["kl_mean"].iloc[0] == pytest.approx(damage[1 - worst])
    path.write_text(json.dumps({**about, "layers": about["layers"][::-1]}))
    with pytest.raises(ResultsError, match="other files"):
        kvlab.run(again, out=tmp_path)


def test_choices_that_are_alike_are_one_program_and_give_the_same(on_tiny, tmp_path):
    model = tools.tiny_model(layers=3).config
    make = lambda **how: config.Cell({}, TASK, HALF, Choice(**how)).make_policies(model)
    assert jax.tree.structure(make(only=0, alike=True)) == jax.tree.structure(make(only=2, alike=True))
    assert jax.tree.structure(make(only=0)) != jax.tree.structure(make(only=2))
    mixed = kvlab.run(with_layers({"only": [1]}, name="mixed"), out=tmp_path)
    alike = kvlab.run(with_layers({"only": [1], "alike": True}, name="alike"), out=tmp_path)
    np.testing.assert_allclose(alike["kl_mean"], mixed["kl_mean"], atol=1e-6)
    assert mixed["kl_mean"].iloc[-1] > 1e-5 and alike["policy"].tolist() == mixed["policy"].tolist()
    with pytest.raises(ConfigError, match="max_k"):
        config.Cell({}, TASK, {"selection": {**HALF["selection"], "max_k": 8}}, Choice(only=0, alike=True)).make_policies(model)


def test_no_ranking_of_several_policies(on_tiny, tmp_path):
    policies = [HALF, {"selection": {"name": "random", "sparsity": 0.5}}]
    kvlab.run({**SMALL, "grid": {"layers.only": [0], "policy": policies}}, out=tmp_path)
    assert not (tmp_path / "less" / "ranking.json").exists()


def test_overrides_reach_axes_and_layers(tmp_path):
    experiment = config.read({**SMALL, "grid": {"layers": [[], {"only": 0}, {"from": "a.json", "keep_full": 8}]}})[1]
    cells = config.expand(experiment, ["layers.keep_full=1", "layers.from=b.json"])
    assert [getattr(c.layers, "keep_full", None) for c in cells] == [None, None, 1] and cells[2].layers.ranking == "b.json"
    with pytest.raises(ConfigError, match="no cell here has layers = { rang"):
        config.expand(experiment, ["layers.rang=1"])
    axis = config.read({**SMALL, "grid": {"layers.only": [0, 1]}, "smoke": {"grid.layers.only": [1]}})[1]
    assert [c.layers.only for c in config.expand(axis, smoke=True)] == [1]
    with pytest.raises(ConfigError, match="did you mean 'layers.only'"):
        config.expand(axis, ["grid.layers.onyl=[1]"])


def test_overrides_of_a_part_reach_the_policies_whose_part_has_the_option():
    policies = [{"label": "full"}, HALF, {"selection": {"name": "hysparse", "gate": "some"}}]
    cells = config.expand(config.read({**SMALL, "grid": {"policy": policies}})[1], ["policy.selection.gate=other"])
    assert [c.policy.get("selection", {}).get("gate") for c in cells] == [None, None, "other"]


def test_a_gate_that_changes_is_another_file(tmp_path):
    path = tmp_path / "gate.safetensors"
    cell = config.Cell({}, TASK, {"selection": {"name": "hysparse", "gate": str(path)}})
    path.write_bytes(b"a")
    before = environment.files_digest(cell)
    path.write_bytes(b"b")
    assert before != environment.files_digest(cell) and environment.files_digest(config.Cell({}, TASK, HALF)) == ""
