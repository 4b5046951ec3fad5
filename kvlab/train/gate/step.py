"""Steps of the three stages, jitted: each takes the state and data, gives the state and what was measured."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from kvlab.gates import Gate, losses
from kvlab.gates.base import GateParam
from kvlab.models.config import ModelConfig
from kvlab.selection.gated import Gated
from kvlab.train.gate import picking, student
from kvlab.train.gate.config import Stage
from kvlab.train.gate.record import Batch
from kvlab.train.gate.student import Reading


class State(NamedTuple):
    """What changes from step to step, and the best that validation has found.

    `trained` is {"gate": …} or, once a stage is joint, {"gate": …, "base": …}; so is `best`.
    """

    trained: Any
    optimiser: Any
    best: Any
    score: Any  # of the best; higher is better
    since: Any  # validations without a better one


class Recorded(NamedTuple):
    """Shards as arrays: queries `[B, L, Q, H, G, D]`, keys `[B, L, H, T, D]`, positions `[B, Q]`."""

    query: Any
    key: Any
    pos: Any


class Trainer:
    """The compiled steps of one training. The base's parameters go in as an argument that no gradient is taken of."""

    def __init__(self, config: ModelConfig, gate: Gate, selection: Gated, layers: tuple[int, ...]):
        self.config, self.selection, self.layers = config, selection, layers
        self._graph, self._template = nnx.split(gate, GateParam)

    def gate(self, values: dict[str, Any]) -> Gate:
        """The gate with these parameters."""
        state = jax.tree.map(lambda x: x, self._template)
        nnx.replace_by_pure_dict(state, values)
        return nnx.merge(self._graph, state)

    # ---------------------------------------------------------------------------------- losses on recorded queries and keys

    def recorded(self, values, data: Recorded, sparsity):
        """The gate's KL to the recorded attention, and the share of it that hard selection reads, means over layers."""
        gate, first = self.gate(values), self.layers[0]
        spec = self.config.attention(first)  # layers without a local window share it, and the rotary embedding
        turns = self.config.rope(first).frequencies(self.config.head_dim) if gate.config.inputs == "pre" else None

        @jax.checkpoint
        def one(index):
            selection = dataclasses.replace(self.selection, layer=gate.layer(jnp.asarray(self.layers)[index], turns))
            query, key = (x[:, index].astype(jnp.float32) for x in (data.query, data.key))
            score, ok = picking.scores(selection, query * spec.scale, key, data.pos)
            teacher = losses.attention(query, key, ok, spec)
            hard = picking.hard(selection, lax.stop_gradient(score), ok, sparsity)
            extra = self._kept(selection, score, ok, hard) if self.selection.mode == "threshold" else jnp.zeros(())
            return losses.divergence(teacher, score, ok), losses.recall(teacher, hard), extra

        return tuple(x.mean() for x in lax.map(one, jnp.arange(len(self.layers))))

    def _kept(self, selection, score, ok, hard, width: float = 1.0):
        """Share of tokens above the threshold: the true one forward, the sigmoid's gradient backward."""
        soft = picking.soft(selection, score, ok, hard, width)
        return (picking.straight_through(hard.astype(jnp.float32), soft).sum(-1) / ok.sum(-1)).mean()

    def kl_loss(self, trained, base, data: Recorded, stage: Stage, sparsity):
        divergence, recall, kept = self.recorded(trained["gate"], data, sparsity)
        return divergence + self._off_target(stage, kept), {"kl": divergence, "recall": recall}

    def _off_target(self, stage: Stage, share):
        """ratio · (share read − target)², for gates with thresholds."""
        return stage.ratio * jnp.square(share - (1 - self.selection.sparsity)) if self.selection.mode == "threshold" else 0.0

    # --------------------------------------------------------------------------------------------- losses through the model

    def model_loss(self, trained, base, data: Batch, stage: Stage, sparsity):
        """distil · KL(base ‖ student) + lm · cross-entropy + kl · attention's KL (+ ratio · (share − target)²)."""
        how = Reading(stage.loss, sparsity, stage.width, stage.detach)
        logits, seen, teacher = self._both(trained, base, data, how)
        lm = mean(optax.softmax_cross_entropy_with_integer_labels(logits, data.target), data.weight)
        distil = mean(divergence(lax.stop_gradient(teacher), logits), data.ok)
        loss = stage.distil * distil + stage.lm * lm + stage.kl * seen.divergence + self._off_target(stage, seen.share)
        return loss, {"distil": distil, "lm": lm, "kl": seen.divergence, "recall": seen.recall, "share": seen.share}

    def judge(self, trained, base, data: Batch):
        """Hard selection at the target, where tokens count as answers: KL from the base's distribution, agreement with its
        first choice, accuracy; and recall."""
        how = Reading("hard", jnp.asarray(self.selection.sparsity, jnp.float32))
        logits, seen, teacher = self._both(trained, base, data, how)
        first = logits.argmax(-1)
        return {
            "distil": mean(divergence(teacher, logits), data.weight),
            "agreement": mean(first == teacher.argmax(-1), data.weight),
            "accuracy": mean(first == data.target, data.weight),
            "recall": seen.recall,
            "share": seen.share,
        }

    def _both(self, trained, base, data: Batch, how: Reading):
        """The student's logits `[B, T, V]` and what it saw, and the frozen base's logits."""
        run = functools.partial(student.run, self.config)
        past = student.prefill(self.config, base, data.before)
        teacher, _ = run(base, None, None, how, past, data.tokens)
        if "base" in trained:
            base, past = trained["base"], student.prefill(self.config, trained["base"], data.before, frozen=False)
        logits, seen = run(base, self.gate(trained["gate"]), self.selection, how, past, data.tokens)
        return logits, seen, teacher

    # ------------------------------------------------------------------------------------------------------------ compiled

    def compiled(self, stage: Stage, rule: optax.GradientTransformation):
        """`step(state, base, data, sparsity) → state, figures`; the state is donated."""
        loss = self.kl_loss if stage.loss == "kl" else self.model_loss

        def step(state: State, base, data, sparsity):
            objective = lambda trained: loss(trained, base, data, stage, sparsity)
            (value, figures), gradient = jax.value_and_grad(objective, has_aux=True)(state.trained)
            update, inner = rule.update(gradient, state.optimiser, state.trained)
            return state._replace(trained=optax.apply_updates(state.trained, update), optimiser=inner), {"loss": value, **figures}

        return jax.jit(step, donate_argnums=0)


def mean(x, weight):
    return (x * weight).sum() / jnp.maximum(weight.sum(), 1.0)


def divergence(teacher_BQV, logits_BQV):
    """KL(teacher ‖ student) of next-token distributions, `[B, Q]`, in nats."""
    teacher, student = (jax.nn.log_softmax(x, -1) for x in (teacher_BQV, logits_BQV))
    return (jnp.exp(teacher) * (teacher - student)).sum(-1)


def rule(stage: Stage) -> optax.GradientTransformation:
    """Adam for the gate and, where the stage is joint, AdamW for the base; the base stays as it is otherwise."""
    shape = lambda peak: optax.warmup_cosine_decay_schedule(0.0, peak, stage.warmup, stage.steps, peak * stage.last)
    gate = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(shape(stage.rate), b2=0.98))
    base = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(shape(stage.base_rate), b2=0.98, weight_decay=0.01))
    kinds = {"gate": gate, "base": base if stage.joint else optax.set_to_zero()}
    return optax.multi_transform(kinds, lambda trained: {name: name for name in trained})


def annealed(stage: Stage, step: int, target) -> np.float32:
    """Sparsity at a step of the stage, from 0 up to the target over `anneal` steps."""
    return np.float32(target * min(1.0, step / stage.anneal) if stage.anneal else target)
