"""One step of training: data, loss, optimiser."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from kvlab.models.config import ModelConfig
from kvlab.tasks.mqar import Recall, sample
from kvlab.train import forward
from kvlab.train.config import Optimiser, Stage

DATA = 1  # sets training data apart from the tasks' own, whose seeds have two numbers


class State(NamedTuple):
    """What changes from step to step."""

    params: Any
    optimiser: Any


def batch(stage: Stage, seed: int, step: int) -> Recall:
    """The data of a step: a pure function of seed and step, so that a resumed run sees what an undisturbed one does."""
    rng = np.random.default_rng([DATA, seed, step])
    return sample(rng, stage.rows, stage.length, stage.pairs, stage.queries)


def loss(params, config: ModelConfig, data: Recall):
    """Mean cross-entropy of the values asked for, in nats, and the share that is right."""
    logits = forward.sequential(config, params, data.context_BT, data.query_BQ)
    right = (logits.argmax(-1) == data.target_BQ).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, data.target_BQ).mean(), right


def schedule(options: Optimiser, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, options.rate, options.warmup, steps, options.rate * options.last)


def adamw(options: Optimiser, steps: int) -> optax.GradientTransformation:
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    rule = optax.adamw(schedule(options, steps), b2=0.98, weight_decay=options.decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(options.clip), rule)


def compiled(config: ModelConfig, rule: optax.GradientTransformation):
    """`step(state, data) → state, loss, share right`, jitted; the state is donated, and each stage's shape compiles once."""

    def step(state: State, data: Recall):
        (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, config, data)
        update, inner = rule.update(gradient, state.optimiser, state.params)
        return State(optax.apply_updates(state.params, update), inner), value, right

    return jax.jit(step, donate_argnums=0)
