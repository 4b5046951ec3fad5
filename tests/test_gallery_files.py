"""The gallery's files: every method is there at every budget, and they hold as many tokens."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import decode, parts
from kvlab.core import PAGE
from kvlab.experiment import config
from kvlab.models.config import ModelConfig

FOLDER = Path(__file__).parents[1] / "experiments"
SMOLLM = ModelConfig(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, context=8192)
RECALL = ModelConfig(layers=2, hidden=128, ffn=128, heads=4, kv_heads=2, head_dim=64, vocab=256, context=1088)


def slots(policy, length: int) -> float:
    """Slots of a head, the mean over a layer's; the budget is what `Policy.fill` is given."""
    budget = policy.budget(length, length + 16)
    if type(policy.retention).__name__ != "DuoAttention":
        return budget
    nothing = jnp.zeros((1, len(policy.retention.full_H), length))
    return float(policy.retention.shares(nothing, None, budget).mean())


@pytest.mark.parametrize("file,model", [("gallery", SMOLLM), ("gallery_4096", SMOLLM), ("gallery_tiny_recall", RECALL)])
def test_methods_hold_as_many_tokens_within_a_page_a_head(file, model):
    experiment = config.read(FOLDER / f"{file}.toml")[1]
    tasks = experiment.grid.get("task") or [experiment.base["task"]]
    (length,) = {task["length"] for task in tasks}
    methods: dict[str, set[str]] = {}
    for table in experiment.grid["policy"][1:]:
        name, _, share = table["label"].rpartition(", ")
        methods.setdefault(share, set()).add(name)
        held = np.mean([slots(p, length) for p in decode.per_layer(parts.policy(table), model)])
        assert abs(held - length * float(share.removesuffix(" %")) / 100) <= PAGE, table["label"]
    assert list(methods) == ["50 %", "25 %", "12.5 %"] and len({frozenset(names) for names in methods.values()}) == 1
    smoke = {table["label"].rpartition(", ")[0] for table in experiment.smoke["grid.policy"][1:]}
    assert smoke == methods["50 %"], "the smoke runs every method"
