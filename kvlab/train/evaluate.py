"""Held-out recall of a trained model, through the forward pass that was trained and through a cache."""

import functools
from typing import Any

import jax
import numpy as np

from kvlab import parts
from kvlab.decode import Engine
from kvlab.models import Model
from kvlab.policy import Policy
from kvlab.tasks import Mqar
from kvlab.tasks.base import Batch
from kvlab.train import forward
from kvlab.train.config import Training

SEED = 1_000_003  # of held-out contexts, plus the training's own


def held_out(model: Model, training: Training) -> dict[str, Any]:
    """A row of figures for each evaluation of the file."""
    engine = Engine(model)
    return {"evaluate": [figures(engine, task, SEED + training.seed) for task in training.tasks()]}


def figures(engine: Engine, task: Mqar, seed: int) -> dict[str, Any]:
    """Accuracy over all queries of a task both ways, and the share on which the two give the same word."""
    dense: list[str] = []
    cached: list[str] = []
    targets: list[str] = []
    for index in range(task.count()):
        batch = task.batch(index, seed, engine.model.tokenizer)
        dense += through_forward(engine.model, batch)
        cached += through_cache(engine, batch, parts.policy({}))
        targets += batch.targets
    same = lambda a, b: float(np.mean([x == y for x, y in zip(a, b)]))
    shape = {"length": task.length, "pairs": task.pairs, "queries": len(targets)}
    return {**shape, "accuracy": same(dense, targets), "accuracy_cache": same(cached, targets), "agreement": same(dense, cached)}


_apart = functools.partial(jax.jit, static_argnames="config")(forward.apart)


def through_forward(model: Model, batch: Batch) -> list[str]:
    """The word after each query, by dense attention over the context."""
    queries = np.array(batch.forced, np.int32).T
    logits = _apart(model.config, model.params, np.array(batch.prompts, np.int32), queries)
    return model.tokenizer.strings(np.asarray(logits[0]).argmax(-1))


def through_cache(engine: Engine, batch: Batch, policy: Policy) -> list[str]:
    """What each row answers, decoded from a cache."""
    session = engine.start(engine.prefill(batch.prompts), policy, batch.new_tokens, batch.rows, batch.forced)
    session.run(batch.new_tokens)
    return [engine.model.tokenizer.decode(ids) for ids in session.answers()]
