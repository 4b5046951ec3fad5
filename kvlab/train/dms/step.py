"""How a gate for `dms` is trained: options, the loss, and steps, jitted."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvlab.errors import ConfigError
from kvlab.gates import ImportanceConfig, ImportanceGate
from kvlab.gates.store import with_values
from kvlab.models.config import ModelConfig
from kvlab.train import importance
from kvlab.train.dms import student
from kvlab.train.gate.step import divergence, mean


@dataclasses.dataclass(frozen=True)
class Training:
    """Options of a training.

    Attributes:
      ratio, delay: of the retention that will use the gate.
      width: of `ImportanceConfig`.
      steps: a context each; anneal: steps over which the share that must go rises from 0 to `ratio`.
      rate, decay: of AdamW, as in `kvlab.train.importance`.
      temperature: of the noisy decisions.
      penalty: weight of what is missing of the share that must go; more than that may go at no cost.
      even: each head must let go of the share, as it will where budgets are equal; otherwise all of them together.
      start: the score that all tokens begin near: about e^−start of the first decisions evict.
      every: steps between validations, each of which is a checkpoint.
    """

    ratio: float = 0.5
    delay: int = 64
    width: int = 64
    steps: int = 120
    anneal: int = 80
    rate: float = 2e-3
    decay: float = 1e-2
    temperature: float = 0.5
    penalty: float = 10.0
    even: bool = True
    start: float = 4.0
    every: int = 20
    seed: int = 0

    def __post_init__(self):
        counts = min(self.delay, self.steps, self.every) >= 1 and min(self.anneal, self.width, self.penalty, self.decay) >= 0
        if not counts or not 0 < self.ratio < 1 or min(self.rate, self.temperature) <= 0:
            raise ConfigError(
                f"dms: {self}; allowed: delay, steps and every from 1; anneal, width, penalty and decay from 0; ratio between 0 "
                "and 1; rate and temperature above 0"
            )

    def target(self, step: int) -> np.float32:
        """The share that must go at a step."""
        return np.float32(self.ratio * min(1.0, step / max(self.anneal, 1)))


class Sequence(NamedTuple):
    """A context, padded on the right, `[1, T]` each: tokens, how much what comes next counts, 1 where a token is no pad."""

    tokens: Any
    weight: Any
    own: Any

    @property
    def length(self) -> int:
        return int(self.own.sum())


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one training. The base's parameters go in as an argument that no gradient is taken of."""

    config: ModelConfig
    training: Training

    @property
    def shape(self) -> ImportanceConfig:
        c = self.config
        return ImportanceConfig(c.layers, c.kv_heads, c.head_dim, c.hidden, self.training.width)

    @property
    def rule(self) -> optax.GradientTransformation:
        return importance.optimiser(self.training.rate, self.training.decay, self.training.steps)

    def first(self) -> dict[str, Any]:
        """The parameters to begin with."""
        values = ImportanceGate(self.shape, self.training.seed).values()
        return {**values, "bias": values["bias"] + self.training.start}

    def gate(self, values) -> ImportanceGate:
        return with_values(ImportanceGate(self.shape), values)

    def loss(self, values, base, data: Sequence, teacher, target, key):
        """KL(base ‖ student) where it counts + penalty · what is missing of the target; and figures."""
        o = self.training
        fade = student.noisy(key, o.temperature)
        logits, fades = student.run(self.config, base, data.tokens, self.gate(values), fade, o.delay)
        gone = -jnp.expm1(jnp.stack(fades)[:, :, :, 0])  # α, [L, B, H, T]
        share = (gone * data.own[:, None]).sum(-1) / data.own.sum(-1)[:, None]
        missing = jnp.maximum(target - (share if o.even else share.mean()), 0.0).mean()
        kl = mean(divergence(teacher, logits), data.weight)
        return kl + o.penalty * missing, {"kl": kl, "evicted": share.mean(), "missing": missing}

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, values, state, base, data: Sequence, target, key):
        """Parameters, the optimiser's state and figures after one step."""
        teacher, _ = student.run(self.config, base, data.tokens)
        loss = functools.partial(self.loss, base=base, data=data, teacher=teacher, target=target, key=key)
        (value, figures), gradient = jax.value_and_grad(loss, has_aux=True)(values)
        update, state = self.rule.update(gradient, state, values)
        return optax.apply_updates(values, update), state, {"loss": value, **figures}

    @functools.partial(jax.jit, static_argnums=0)
    def judge(self, values, base, data: Sequence, budget):
        """KL from the base, and how often the first choice is the base's, where each head stores `budget` tokens."""
        o, (teacher, _) = self.training, student.run(self.config, base, data.tokens)
        fade = student.ranked(budget, o.delay)
        logits, _ = student.run(self.config, base, data.tokens, self.gate(values), fade, o.delay)
        same = teacher.argmax(-1) == logits.argmax(-1)
        return {"kl": mean(divergence(teacher, logits), data.weight), "agreement": mean(same, data.weight)}
