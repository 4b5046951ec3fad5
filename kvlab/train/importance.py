"""Training an importance gate: records of contexts on disk, a loss, a step, and the driver that keeps the best gate.

train = recorded(model, contexts, folder)          # a file a context, made once
gate, log = fit(train, held_out, Training(), model.config)
kvlab.gates.save(gate, "gate.safetensors")         # retention = {name = "gated", gate = "gate.safetensors", ratio = 0.5}
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvlab.errors import ConfigError
from kvlab.gates import ImportanceConfig, ImportanceGate
from kvlab.gates.store import with_values
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.train import targets

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Training:
    """How a gate is trained.

    Attributes:
      width, vectors: of `ImportanceConfig`.
      epochs: times that every context is gone through.
      rows: tokens of a context in one step, in all layers at once.
      rate: of AdamW, which falls to 0 along a cosine; decay: its weight decay, of matrices.
      share: of the tokens, at the top, whose overlap with the teacher's decides which gate is kept.
    """

    width: int = 64
    vectors: bool = False
    epochs: int = 10
    rows: int = 512
    rate: float = 2e-3
    decay: float = 1e-2
    share: float = 0.5
    seed: int = 0

    def __post_init__(self):
        if min(self.epochs, self.rows) < 1 or self.rate <= 0 or not 0 < self.share < 1:
            given = f"epochs={self.epochs}, rows={self.rows}, rate={self.rate}, share={self.share}"
            raise ConfigError(f"training: {given}; allowed: epochs and rows from 1, rate above 0, share between 0 and 1")


# ------------------------------------------------------------------------------------------------------------- records


class Shards(Sequence):
    """Records in files, read when they are asked for, so that only one is in memory."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = tuple(paths)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        from safetensors.numpy import load_file

        return Shards(self.paths[index]) if isinstance(index, slice) else load_file(self.paths[index])


def recorded(
    model: Model, contexts: Sequence[Sequence[int]], folder: str | Path, teacher: str = "replay", vectors: bool = False
) -> Shards:
    """Records of contexts (token ids) in a folder; a context that is there is not recorded again.

    A file's name depends on the model's weights, the token ids, the teacher and whether keys and values are in it.
    """
    from safetensors.numpy import save

    from kvlab.experiment.store import writing

    paths = []
    for ids in contexts:
        about = json.dumps([model.digest, teacher, vectors, list(map(int, ids))])
        path = Path(folder) / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.safetensors"
        if not path.exists():
            with writing(path) as part:
                part.write_bytes(save(targets.record_context(model, ids, teacher, vectors)))
        paths.append(path)
    return Shards(paths)


# ------------------------------------------------------------------------------------------------------- loss and step


def scores(params, config: ImportanceConfig, batch: Arrays):
    """The gate's log-importance `[L, H, T]` for recorded tokens."""
    layers = with_values(ImportanceGate(config), params).stacked()
    float_ = lambda name: batch[name].astype(jnp.float32)[:, None] if config.vectors else None
    one = lambda layer, hidden, key, value: layer(key, value, None, hidden[None, None])[0]
    return jax.vmap(one)(layers, batch["hidden"], float_("key"), float_("value"))


def loss(params, config: ImportanceConfig, batch: Arrays):
    """Mean squared error of log-importance, whose targets are clipped below (`kvlab.train.targets.FLOOR`).

    In logarithms the many middling tokens, between which a budget decides, weigh as much as the few large ones. KVzap,
    https://arxiv.org/abs/2601.07891, regresses the logarithm too.
    """
    return jnp.mean((scores(params, config, batch) - batch["target"]) ** 2)


def optimiser(rate: float, decay: float, steps: int) -> optax.GradientTransformation:
    """AdamW with a short warm-up and a cosine to 0; biases do not decay."""
    falling = optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 20, 1), max(steps, 2))
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 2, params)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(falling, weight_decay=decay, mask=matrices))


@functools.partial(jax.jit, static_argnames=("config", "rule"), donate_argnames=("params", "state"))
def step(params, state, batch: Arrays, config: ImportanceConfig, rule: optax.GradientTransformation):
    """Parameters, the optimiser's state and the loss after one step."""
    value, gradient = jax.value_and_grad(loss)(params, config, batch)
    update, state = rule.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value


def batches(records: Sequence[Arrays], rows: int, seed: int, epoch: int) -> Iterator[Arrays]:
    """An epoch's batches, in an order that depends on seed and epoch only; what does not fill a batch is left out."""
    rng = np.random.default_rng([7, seed, epoch])
    for index in rng.permutation(len(records)):
        record = records[index]
        order = rng.permutation(record["target"].shape[-1])
        for begin in range(0, len(order) - rows + 1, rows):
            yield take(record, np.sort(order[begin : begin + rows]))


def take(record: Arrays, tokens) -> Arrays:
    """A record's arrays at some tokens."""
    return {name: x[:, tokens] if name == "hidden" else x[:, :, tokens] for name, x in record.items()}


# -------------------------------------------------------------------------------------------------------------- driver


def agreement(score_LHT, target_LHT, share: float) -> dict[str, float]:
    """How alike two rankings of tokens are, averaged over layers and heads.

    spearman: rank correlation; overlap: of the best `share` of the tokens by one, how many are among the other's.
    """
    from scipy.stats import spearmanr

    T = score_LHT.shape[-1]
    rows = list(zip(np.reshape(score_LHT, (-1, T)), np.reshape(target_LHT, (-1, T))))
    n = max(1, int(T * share))
    top = lambda x: set(np.argsort(-x, kind="stable")[:n].tolist())
    # a constant score ranks nothing, so its correlation, which is not defined, counts as none
    rank = [spearmanr(a, b).statistic if np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0 for a, b in rows]
    return {"spearman": float(np.mean(rank)), "overlap": float(np.mean([len(top(a) & top(b)) / n for a, b in rows]))}


def validate(gate: ImportanceGate, records: Sequence[Arrays], share: float) -> dict[str, float]:
    """`agreement` with the teacher, averaged over contexts."""
    params, got = gate.values(), []
    for record in records:
        got.append(agreement(np.asarray(_scores(params, gate.config, record)), record["target"], share))
    return {name: float(np.mean([g[name] for g in got])) for name in got[0]}


_scores = jax.jit(scores, static_argnums=1)


def fit(
    records: Sequence[Arrays], held_out: Sequence[Arrays], training: Training, model: ModelConfig
) -> tuple[ImportanceGate, list[dict[str, float]]]:
    """The gate that agreed best with the teacher on the held-out contexts, and an epoch's loss and agreement a line.

    Errors: ConfigError where there is nothing to train or to validate on.
    """
    lengths = [r["target"].shape[-1] for r in records]
    steps = sum(n // training.rows for n in lengths) * training.epochs
    if not steps or not len(held_out):
        raise ConfigError(
            f"{len(lengths)} contexts with {max(lengths, default=0)} tokens at most, {len(held_out)} held out; give at least one "
            f"of {training.rows} tokens (rows) to train on and one to validate on"
        )
    shape = (model.layers, model.kv_heads, model.head_dim, model.hidden)
    config = ImportanceConfig(*shape, training.width, training.vectors)
    gate = ImportanceGate(config, training.seed)
    params = {**gate.values(), "bias": jnp.asarray(np.mean([r["target"].mean(-1) for r in records], 0))}
    rule = optimiser(training.rate, training.decay, steps)
    state, log, best = rule.init(params), [], None
    for epoch in range(training.epochs):
        losses = []
        for batch in batches(records, training.rows, training.seed, epoch):
            params, state, value = step(params, state, batch, config, rule)
            losses.append(value)
        with_values(gate, params)
        log.append({"epoch": epoch, "loss": float(np.mean(losses)), **validate(gate, held_out, training.share)})
        if log[-1]["overlap"] >= max(line["overlap"] for line in log):
            best = jax.tree.map(np.asarray, params)
    return with_values(gate, jax.tree.map(jnp.asarray, best)), log
