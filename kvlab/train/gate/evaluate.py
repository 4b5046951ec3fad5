"""A trained gate judged where it will be used: in the decode loop."""

from pathlib import Path
from typing import Any

import numpy as np

from kvlab import models, parts
from kvlab.decode import Engine
from kvlab.models import Model
from kvlab.tasks import Answers
from kvlab.train.evaluate import through_cache
from kvlab.train.gate.config import GateTraining
from kvlab.train.store import GATE

SEED = 2_000_003  # of held-out contexts, plus the training's own


def decoded(model: Model, training: GateTraining, folder: Path) -> list[dict[str, Any]]:
    """For each task the share of right answers with the full cache of the base and with the gate (on the base as trained)."""
    served = Engine(models.load(str(folder / "model")) if training.joint else model)
    policy, plain = parts.policy({"selection": training.table(str(folder / GATE))}), Engine(model)
    rows = []
    for task in training.tasks():
        full = _accuracy(plain, parts.policy({}), task, training.seed)
        gated = _accuracy(served, policy, task, training.seed)
        name = type(task).__name__.lower()
        rows.append({"task": name, "items": len(full), "full": float(full.mean()), "gate": float(gated.mean())})
    return rows


def _accuracy(engine: Engine, policy, task, seed: int) -> np.ndarray:
    right: list[bool] = []
    for index in range(task.count()):
        batch = task.batch(index, SEED + seed, engine.model.tokenizer)
        answers = through_cache(engine, batch, policy)
        right += [row["correct"] for row in task.score(batch, Answers(answers))]
    return np.array(right)
