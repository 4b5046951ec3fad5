"""What eight policies cost beside one: on a tiny random model, so that only the counts mean something."""

from kvlab.bench import sweep


def test_a_warm_sweep_compiles_nothing(on_tiny, monkeypatch):
    assert len({policy["label"] for policy in sweep.POLICIES}) == 8
    monkeypatch.setattr(sweep, "POLICIES", sweep.POLICIES[:3])
    figures = sweep.main("tiny", length=300, contexts=1, needles=2, continuation=4, pairs=1)
    assert figures["policies"] == 3
    for name in ("needles", "with_likelihood"):
        assert figures[name]["compilations_warm"] == 0 < figures[name]["compilations"]
        assert figures[name]["ratio"] > 1
