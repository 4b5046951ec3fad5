"""From contexts to a gate for `dms`: steps that can be killed and continued, the best gate by hard decisions kept."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from kvlab.core import PAGE, kept
from kvlab.errors import ConfigError
from kvlab.experiment import report
from kvlab.gates import ImportanceGate
from kvlab.models import Model
from kvlab.train.dms.step import Sequence, Trainer, Training
from kvlab.train.gate import record
from kvlab.train.gate.config import Data
from kvlab.train.store import Folder


class State(NamedTuple):
    """What changes from step to step, and the best that validation has found."""

    values: Any
    optimiser: Any
    best: Any
    kl: Any  # held out, of the best


def sequences(data: Data, tokenizer) -> list[Sequence]:
    """All contexts, padded to the longest, in whole pages; what comes next counts in all of a text and in a task's answers."""
    one = msgspec.structs.replace(data, queries=1)  # no queries are recorded
    contexts = [record.context(one, tokenizer, index) for index in range(data.contexts)]
    width = -(-max(len(c.tokens) for c in contexts) // PAGE) * PAGE
    padded = lambda x, kind: np.pad(np.asarray(x, kind), (0, width - len(x)))[None]
    made = lambda c: (padded(c.tokens, np.int32), padded(c.weight[1:], np.float32), padded(np.ones(len(c.tokens)), np.float32))
    return [Sequence(*made(c)) for c in contexts]


class Fit:
    """One gate being trained, a context a step, in an order that depends on seed and step alone.

    Errors: ConfigError for contexts that are too short for the delay.
    """

    def __init__(self, name: str, model: Model, data: Data, held_out: int, training: Training, folder: Folder):
        self.name, self.model, self.training, self.folder = name, model, training, folder
        self.trainer, made = Trainer(model.config, training), sequences(data, model.tokenizer)
        self.data, self.held_out = made[:-held_out], made[-held_out:]
        if (left := kept(shortest := min(s.length for s in made), training.ratio)) <= training.delay:
            raise ConfigError(
                f"dms: ratio={training.ratio} keeps {left} of a context's {shortest} tokens, delay={training.delay} takes all of "
                "them; write a shorter delay or longer contexts"
            )

    def run(self) -> tuple[ImportanceGate, dict[str, Any]]:
        """The best gate and figures, after the steps that are left from the newest checkpoint on."""
        values, steps = self.trainer.first(), self.training.steps
        first, state = self.folder.restore(State(values, self.trainer.rule.init(values), values, jnp.float32(jnp.inf)))
        with report.progress() as bar:
            task = bar.add_task(self.name, total=steps, completed=first)
            if not self.folder.lines():
                self._log(0, time.perf_counter(), self._judged(values))
            for now in range(first + 1, steps + 1):
                begin = time.perf_counter()
                state, figures = self._step(now, state)
                self._log(now, begin, figures)
                if "held_out_kl" in figures:
                    self.folder.save(now, state)
                text = f"{self.name} KL {figures['kl']:.4f} evicted {figures['evicted']:.2f}"
                bar.update(task, advance=1, description=text)
        return self.trainer.gate(jax.tree.map(jnp.asarray, state.best)), self._summary()

    def _step(self, now: int, state: State) -> tuple[State, dict[str, float]]:
        o, base = self.training, self.model.params
        epoch, index = divmod(now - 1, len(self.data))
        data = self.data[np.random.default_rng([8, o.seed, epoch]).permutation(len(self.data))[index]]
        key = jax.random.fold_in(jax.random.key(o.seed), now)
        values, inner, figures = self.trainer.step(state.values, state.optimiser, base, data, o.target(now), key)
        state, figures = state._replace(values=values, optimiser=inner), {name: float(x) for name, x in figures.items()}
        if now % o.every == 0 or now == o.steps:
            figures |= (judged := self._judged(values))
            if judged["held_out_kl"] < state.kl:
                state = state._replace(best=values, kl=jnp.float32(judged["held_out_kl"]))
        return state, figures

    def _judged(self, values) -> dict[str, float]:
        """By hard decisions at the retention's budget, means over the held-out contexts."""
        budget = lambda data: np.int32(kept(data.length, self.training.ratio))
        found = [self.trainer.judge(values, self.model.params, data, budget(data)) for data in self.held_out]
        return {f"held_out_{name}": float(np.mean([f[name] for f in found])) for name in found[0]}

    def _log(self, step: int, begin: float, figures: dict[str, float]) -> None:
        self.folder.log({"step": step, **figures, "seconds": round(time.perf_counter() - begin, 3)})

    def _summary(self) -> dict[str, Any]:
        untrained, *judged = [line for line in self.folder.lines() if "held_out_kl" in line]
        best = min(judged, key=lambda line: line["held_out_kl"])
        seconds = sum(line["seconds"] for line in self.folder.lines())
        figures = {name: best[name] for name in ("held_out_kl", "held_out_agreement")}
        return {"best": best["step"], **figures, "untrained_kl": untrained["held_out_kl"], "seconds": round(seconds, 1)}
