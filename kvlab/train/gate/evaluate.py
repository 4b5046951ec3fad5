"""A trained gate judged where it will be used: in the decode loop."""

from pathlib import Path
from typing import Any

import numpy as np

from kvlab import models, parts
from kvlab.decode import Engine
from kvlab.models import Model
from kvlab.train.gate.config import GateTraining

SEED = 2_000_003  # of held-out contexts, plus the training's own


def decoded(model: Model, training: GateTraining, folder: Path, task) -> dict[str, Any]:
    """Share of right answers with the full cache of the base and with the gate (on the base as trained, if it was)."""
    served = models.load(str(folder / "model")) if training.joint else model
    selection = training.table(str(folder / "gate.safetensors"))
    full = _accuracy(Engine(model), parts.policy({}), task, training.seed)
    gated = _accuracy(Engine(served), parts.policy({"selection": selection}), task, training.seed)
    return {"task": type(task).__name__.lower(), "items": len(full), "full": float(full.mean()), "gate": float(gated.mean())}


def _accuracy(engine: Engine, policy, task, seed: int) -> np.ndarray:
    right: list[bool] = []
    for index in range(task.count()):
        batch = task.batch(index, SEED + seed, engine.model.tokenizer)
        session = engine.start(engine.prefill(batch.prompts), policy, batch.new_tokens, batch.rows, batch.forced)
        session.run(batch.new_tokens)
        answers = [engine.model.tokenizer.decode(ids) for ids in session.answers()]
        right += [row["correct"] for row in task.score(batch, answers, None, None)]
    return np.array(right)
