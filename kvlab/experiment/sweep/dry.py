"""What an experiment would take, before it runs: programs to compile, minutes and disk.

Programs follow from shapes and policies, of the first batches of each model and task; so do bytes, by what `store` writes of a
batch. Minutes are those of finished batches of the same model and task, wherever they lie in the results folder; where there are
none they are a guess (see `pace`).
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from kvlab.attention import PREFILL_BLOCK
from kvlab.core import PAGE
from kvlab.decode import bucket, budgets, needs, per_layer
from kvlab.errors import KvlabError
from kvlab.experiment import compare, config, store
from kvlab.experiment.decoded import ENTROPY_STEPS, FULL
from kvlab.experiment.sweep import pace
from kvlab.experiment.sweep.pace import Seen
from kvlab.models.config import ModelConfig
from kvlab.needs import REPLAYED
from kvlab.tasks import Batch

LOOKED_AT = 4  # batches of each model and task whose shapes are looked at
LISTS = 4  # figures per token in a row that compares logits
HEADER = 280  # bytes of an array in an archive, besides its numbers


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Batches in all and finished, programs by kind, minutes with what they rest on, and bytes still to be written.

    What follows from a model is None where a model is not here; `missing` names those. `failing` are cells that would fail, and
    why; they are left out.
    """

    batches: int
    finished: int
    traces: dict[str, int] | None
    minutes: float | None
    basis: str
    disk: int | None
    missing: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def as_json(self, cells: Sequence[config.Cell]) -> dict[str, Any]:
        listed = [{"run_id": c.run_id, "policy": c.label, "task": c.task["name"]} for c in cells]
        return {"cells": listed, **dataclasses.asdict(self)}


def estimate(cells: Sequence[config.Cell], place: Path) -> Estimate:
    """What the cells would take, beside what their results folder has of them. Errors: KvlabError, as the run's own."""
    runs = [store.Run(place, cell) for cell in cells]
    counts = [cell.make_task().count() for cell in cells]
    done = sum(len(run.numbers()) for run in runs)
    if missing := tuple(sorted({m for cell in cells if not here(m := cell.model.get("name", ""))})):
        return Estimate(sum(counts), done, None, None, "", None, missing)
    groups: dict[str, list[config.Cell]] = {}
    for run in runs:
        groups.setdefault(run.cell.group, []).append(run.cell)
    looks: dict[str, tuple] = {}
    looked = [look(group, looks) for group in groups.values()]
    failing, seen = tuple(text for group in looked for text in group.failing), [group for group in looked if group.cells]
    traces = programs(seen)
    left = {run.cell.run_id: (count - len(run.numbers())) / count for run, count in zip(runs, counts)}
    seconds, basis = pace.duration(seen, left, pace.history(place.parent), sum(traces.values()))
    return Estimate(sum(counts), done, traces, seconds / 60, basis, round(sum(disk(group, left) for group in seen)), (), failing)


def here(model: str) -> bool:
    """Whether a model need not be fetched first."""
    from kvlab.models import fetch

    if model in fetch.PACKAGED:
        return (fetch.cache_folder() / "models" / model).exists()
    if model.startswith(fetch.HUB):
        from huggingface_hub import try_to_load_from_cache

        repository, _, revision = model.removeprefix(fetch.HUB).partition("@")
        found = try_to_load_from_cache(repository, "config.json", fetch.cache_folder() / "hub", revision or None)
        return isinstance(found, str)
    return True


def look(cells: list[config.Cell], looks: dict[str, tuple]) -> Seen:
    """A group's shapes; batches of one model and task are made once, of the first seed."""
    first = cells[0]
    key = json.dumps([first.model, first.task], sort_keys=True)
    if key not in looks:
        task = first.make_task()
        shape, tokenizer = described(first.model["name"])
        looks[key] = shape, task, [task.batch(i, first.seed, tokenizer) for i in range(min(task.count(), LOOKED_AT))]
    shape, task, batches = looks[key]
    made, failing = [], []
    for cell in cells:
        try:
            made.append((cell, cell.make_policies(shape)))
        except KvlabError as error:
            failing.append(f"{cell.label}, {cell.task['name']}, seed {cell.seed}: {error}")
    return Seen([cell for cell, _ in made], shape, task, batches, [policies for _, policies in made], failing)


def described(name: str) -> tuple[ModelConfig, Any]:
    """A model's shape and tokenizer, without its weights. Errors: ModelError."""
    from kvlab.models import chat, checkpoint, families, fetch
    from kvlab.models.tokenizer import Tokenizer

    folder = fetch.find(name)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    template = chat.template(folder)
    tokenizer.render = chat.renderer(template, tokenizer, ()) if template else None
    return families.to_config(checkpoint.read_json(folder / "config.json"), str(folder)), tokenizer


# ------------------------------------------------------------------------------------------------------------- programs


def programs(groups: Sequence[Seen]) -> dict[str, int]:
    """How many different programs there are of each kind; a retention whose heads share a pool may need more."""
    found: dict[str, set] = {"prefill": set(), "fill": set(), "decode": set()}
    for group in groups:
        extra = [] if any(map(compare.is_full, group.cells)) else _plain(group)
        for batch in group.batches:
            _add(found, group, batch, extra)
    return {kind: len(keys) for kind, keys in found.items()}


def _plain(group: Seen) -> list[tuple]:
    """The full cache, where the group lacks it and something is compared with it."""
    compared = group.task.compares_logits or group.task.compares_answers
    return [per_layer(FULL, group.model)] if compared or group.batches[0].spans else []


def _add(found: dict[str, set], group: Seen, batch: Batch, extra: list[tuple]) -> None:
    longest, P, B = max(map(len, batch.prompts)), len(batch.prompts), len(batch.rows)
    blocks = [cell.prefill_block for cell in group.cells] + [PREFILL_BLOCK] * len(extra)
    every = [*group.policies, *extra]
    forced = -(-max([len(ids) for ids in batch.forced] + [1]) // PAGE)
    follow = max((sum(b - a for a, b in zip(s[::2], s[1::2])) for s in batch.spans), default=0)
    for block in set(blocks):
        asked = frozenset(needs([p for b, policies in zip(blocks, every) if b == block for p in policies]))
        shape = (group.model, P, bucket(longest), asked - REPLAYED)
        found["prefill"].add((*shape, min(block, bucket(longest))))
        for policies in (policies for b, policies in zip(blocks, every) if b == block):
            sizes = budgets(policies, longest, batch.new_tokens)
            made = tuple(map(_static, policies))
            found["fill"] |= {(P, bucket(longest), asked, *each) for each in zip(made, sizes)}
            found["decode"].add((group.model, made, sizes, B, forced, follow, group.task.compares_logits, batch.sampling is None))


def _static(policy) -> tuple:
    """What a policy says to the compiler: its static fields, and the shapes of the others."""
    leaves, structure = jax.tree.flatten(policy)
    return structure, tuple((jax.numpy.shape(x), str(jax.numpy.asarray(x).dtype)) for x in leaves)


# ----------------------------------------------------------------------------------------------------------------- disk


def disk(group: Seen, left: dict[str, float]) -> float:
    """Bytes that the group's cells still write."""
    count, total = group.task.count(), 0.0
    for cell, policies in zip(group.cells, group.policies):
        each = statistics.mean(_batch_bytes(group, batch, policies) for batch in group.batches)
        total += (3_000 + count * each) * left[cell.run_id]
    return total


def _batch_bytes(group: Seen, batch: Batch, policies: tuple) -> float:
    """Of one batch: arrays, compressed as they were in runs of SmolLM2-135M and tiny-recall, and rows as text."""
    m, B, n = group.model, len(batch.rows), batch.new_tokens
    slots = max(budgets(policies, max(map(len, batch.prompts)), n))
    kept = len(batch.prompts) * m.layers * m.kv_heads * slots * 4
    entropy = min(ENTROPY_STEPS, n) * m.layers * B * m.heads * 4
    drift = n * m.layers * B * 4 if group.task.compares_logits else 0
    prompts = 4 * sum(map(len, batch.prompts))
    arrays = 0.07 * kept + 0.8 * (entropy + drift) + 0.4 * prompts + B * n
    texts = len(json.dumps(list(batch.facts))) + B * (300 + n * (LISTS * 16 if group.task.compares_logits else 2))
    return arrays + HEADER * (5 + len(batch.prompts)) + texts + 2 * (22 * n + 250)


# -------------------------------------------------------------------------------------------------------------- in words


def show(name: str, cells: Sequence[config.Cell], made: Estimate) -> None:
    """In lines: every cell, then the sums."""
    for cell in cells:
        print(f"{cell.run_id}  {cell.task['name']:12} seed {cell.seed}  {cell.label}")
    print(f"{name}: {len(cells)} cells, {made.batches} batches, {made.finished} of them finished")
    if made.traces is None or made.disk is None:
        print(f"programs, minutes and disk: unknown without {', '.join(made.missing)}; write kvlab fetch {made.missing[0]}")
        return
    for text in made.failing:
        print(f"would fail: {text}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.traces.items())
    print(f"programs to compile: {sum(made.traces.values())} ({kinds})")
    print(f"minutes: {made.minutes:.1f} ({made.basis})")
    print(f"disk: {made.disk / 1e6:.1f} MB")
