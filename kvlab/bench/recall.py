"""How much of a model's attention selections read at an equal number of tokens, on text that no gate was trained on."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab import gates, models
from kvlab.attention import AttentionSpec
from kvlab.codec import Raw
from kvlab.core import PAGE, Around, Pages, Record
from kvlab.evaluate import statistics
from kvlab.experiment import report
from kvlab.experiment.store import writing
from kvlab.layout import Contiguous
from kvlab.models import Model
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import SELECTIONS, KeyNorm, Oracle, Quest, Random, Recency
from kvlab.selection.controls import attention
from kvlab.train.gate import record
from kvlab.train.gate.config import KINDS, Data

ALPHA = 0.025  # one-sided: intervals are at 95 %


def main(
    gate: str, model: str, text: str, length: int, contexts: int, queries: int, sparsity: list[float], picture: Path | None
) -> dict[str, Any]:
    """Share of attention read by the gate and by every alternative, with intervals by context."""
    loaded = models.load(model)
    data = Data(contexts=contexts, texts=(text,), length=length, queries=queries, dtype="float32", seed=1)
    rows = []
    with report.progress() as bar:
        task = bar.add_task("attention read", total=contexts)
        found: dict[tuple[float, str], list[tuple[np.ndarray, float]]] = {}
        for index in range(contexts):
            for key, value in of_context(loaded, data, index, gate, sparsity).items():
                found.setdefault(key, []).append(value)
            bar.update(task, advance=1)
    for share in sparsity:
        clusters = np.repeat(np.arange(contexts), queries)
        column = {name: np.concatenate([m for m, _ in each]) for (s, name), each in found.items() if s == share}
        tokens = {name: float(np.mean([n for _, n in each])) for (s, name), each in found.items() if s == share}
        for name, mass in column.items():
            own = statistics.mean(mass, clusters, ALPHA)
            row = {"sparsity": share, "selection": name, "recall": float(mass.mean()), "low": own.low, "high": own.high}
            if name != "gate":
                gap = statistics.mean_difference(column["gate"], mass, clusters, ALPHA)
                row |= {"gate_minus": gap.value, "gate_minus_low": gap.low, "gate_minus_high": gap.high}
            rows.append({**row, "tokens": tokens[name]})
    show(rows, f"{model}, {text}, {contexts} × {length} tokens")
    if picture:
        draw(rows, picture)
    return {"gate": gate, "model": model, "text": text, "length": length, "contexts": contexts, "rows": rows}


def selections(config, gate: str, sparsity: float, layer: int, **forced: Any) -> dict[str, Any]:
    """What is compared, for one layer. The window of the newest tokens and the sinks (`forced`) are the same for all."""
    trained = gates.load(gate)
    untrained = gates.make(trained.kind, trained.config)
    kind = SELECTIONS[KINDS[trained.kind]]
    return {
        "gate": kind(sparsity, layer=trained.at(layer, config), **forced),
        "untrained gate": kind(sparsity, layer=untrained.at(layer, config), **forced),
        "quest": Quest(sparsity, **forced),
        "key norm": KeyNorm(sparsity, **forced),
        "recency": Recency(sparsity, **forced),
        "random": Random(sparsity, **forced),
        "oracle": Oracle(sparsity, **forced),
    }


def of_context(model: Model, data: Data, index: int, gate: str, sparsity: list[float]):
    """Per (sparsity, selection): attention read of each query, mean over layers and heads, and the mean number of tokens."""
    made = record.context(data, model.tokenizer, index)
    layers = record.layers(model, data)
    shard = record.arrays(model, data, made, data.length)
    found: dict[tuple[float, str], list] = {}
    for row, layer in enumerate(layers):
        spec = model.config.attention(layer)
        for share in sparsity:
            for name, selection in selections(model.config, gate, share, layer).items():
                got = read(selection, shard["query"][row], shard["key"][row], shard["pos"], spec)
                found.setdefault((share, name), []).append(jax.tree.map(np.asarray, got))
    mean = lambda each: (np.mean([m.mean(-1) for m, _ in each], 0), float(np.mean([n for _, n in each])))
    return {key: mean(each) for key, each in found.items()}


@functools.partial(jax.jit, static_argnames="spec")
def read(selection, query_QHGD, key_HTD, pos_Q, spec: AttentionSpec):
    """Attention read `[Q, H]` and tokens read `[Q, H]` by each query, as the selection itself picks from a cache."""
    T = key_HTD.shape[1]
    key = jnp.asarray(key_HTD)[None]
    policy = Policy(KeepAll(), Raw(), Contiguous(), selection)
    cache = policy.fill(Record(key, key, jnp.arange(T)[None]), -(-T // PAGE) * PAGE)
    full = jnp.pad(key[0], ((0, 0), (0, cache.pos[0, 0].size - T), (0, 0))).reshape(*cache.pos.shape[1:], -1)

    def one(query_and_now):
        query, now = query_and_now
        query = query[None] * spec.scale
        visible = (cache.pos >= 0) & (cache.pos <= now)
        logits = spec.cap(jnp.einsum("hgd,hnpd->hgnp", query[0], full))[None]
        picked = selection.select(cache.index, query, visible, cache, Around(None, lambda: logits))
        hit = visible & _mask(picked, cache.pos.shape)
        mass = jnp.where(hit, attention(logits, visible), 0.0)
        return mass.sum((-1, -2))[0], hit.sum((-1, -2))[0]

    return lax.map(one, (jnp.asarray(query_QHGD), jnp.asarray(pos_Q)))


def _mask(picked, shape):
    """Which slots `[B, H, N, P]` a selection named."""
    B, H, N, P = shape
    size = N if isinstance(picked, Pages) else N * P
    row, head = jnp.indices((B, H), sparse=True)
    index = jnp.where(picked.index >= 0, picked.index, size)
    mask = jnp.zeros((B, H, size), bool).at[row[..., None], head[..., None], index].set(True, mode="drop")
    return jnp.broadcast_to(mask.reshape(B, H, N, -1), shape)


def show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"attention read, {title}; 95 % intervals by context")
    for heading in ("sparsity", "selection", "attention read", "gate − it", "tokens"):
        table.add_column(heading, justify="left" if heading == "selection" else "right")
    for row in rows:
        gap = (
            f"{row['gate_minus']:+.3f} [{row['gate_minus_low']:+.3f}, {row['gate_minus_high']:+.3f}]"
            if "gate_minus" in row
            else ""
        )
        mass = f"{row['recall']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        table.add_row(f"{row['sparsity']:g}", row["selection"], mass, gap, f"{row['tokens']:.0f}")
    Console(width=None if Console().is_terminal else 120).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Attention read against the share of tokens read, a line per selection."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4.5))
    for name in dict.fromkeys(row["selection"] for row in rows):
        mine = sorted(
            (1 - r["sparsity"], r["recall"], r["recall"] - r["low"], r["high"] - r["recall"])
            for r in rows
            if r["selection"] == name
        )
        x, y, low, high = map(np.array, zip(*mine))
        axis.errorbar(x, y, [np.maximum(low, 0), np.maximum(high, 0)], marker="o", capsize=3, label=name)
    axis.set_xlabel("share of tokens read")
    axis.set_ylabel("share of attention read")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, bbox_to_anchor=(1.02, 0.5), loc="center left")
    with writing(path) as part:
        figure.savefig(part, dpi=110, format="png", bbox_inches="tight")
    plt.close(figure)
