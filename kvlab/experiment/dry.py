"""What an experiment would take, before it runs: programs to compile, minutes and disk.

Programs follow from shapes and policies, of the first batches of each model and task; so do bytes, by what `store` writes of a
batch. Minutes are those of finished batches of the same model and task, wherever they lie in the results folder; where there are
none they come from `Arithmetic`, which is a guess.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec

from kvlab import parts
from kvlab.attention import PREFILL_BLOCK
from kvlab.core import PAGE
from kvlab.decode import bucket, budgets, needs, per_layer
from kvlab.experiment import compare, config, store
from kvlab.models.config import ModelConfig
from kvlab.needs import REPLAYED
from kvlab.tasks import Batch, Task

LOOKED_AT = 4  # batches of each model and task whose shapes are looked at
STEPS = 4  # steps of a batch whose entropy is kept
LISTS = 4  # figures per token in a row that compares logits
FULL = parts.policy({})


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Batches in all and finished, programs by kind, minutes with what they rest on, and bytes still to be written.

    What follows from a model is None where a model is not here; `missing` names those.
    """

    batches: int
    finished: int
    traces: dict[str, int] | None
    minutes: float | None
    basis: str
    disk: int | None
    missing: tuple[str, ...] = ()

    def as_json(self, cells: Sequence[config.Cell]) -> dict[str, Any]:
        listed = [{"run_id": c.run_id, "policy": c.label, "task": c.task["name"]} for c in cells]
        return {"cells": listed, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A machine by three figures: operations and bytes a second that one process gets done, seconds to compile a program."""

    operations: float = 4e10
    bytes: float = 8e9
    program: float = 3.0

    @property
    def words(self) -> str:
        return f"a guess: {self.operations:.0e} operations and {self.bytes:.0e} bytes a second, {self.program:g} s a program"

    def batch(self, model: ModelConfig, weights: int, batch: Batch, policies: int) -> float:
        """Seconds that a batch takes: one prefill for all, and steps of each policy, which read all weights."""
        T, B = bucket(max(map(len, batch.prompts))), len(batch.rows)
        wide = model.heads * model.head_dim * model.layers
        prefill = len(batch.prompts) * (2 * weights * T + 2 * wide * T * T)
        kv = 8 * B * T * model.kv_heads * model.head_dim * model.layers
        step = max(2 * weights * B / self.operations, 4 * weights / self.bytes) + kv / self.bytes
        return prefill / self.operations + policies * batch.new_tokens * step


@dataclasses.dataclass(frozen=True)
class Seen:
    """A group of cells as far as it is looked at: the model's shape, a few batches, every cell's policies."""

    cells: list[config.Cell]
    model: ModelConfig
    task: Task
    batches: list[Batch]
    policies: list[tuple]


def estimate(cells: Sequence[config.Cell], out: Path, name: str) -> Estimate:
    """What the cells would take, beside what the results folder `out/name` has of them. Errors: KvlabError, as the run's own."""
    runs = [store.Run(out / name, cell) for cell in cells]
    counts = [cell.make_task().count() for cell in cells]
    done = sum(len(run.numbers()) for run in runs)
    if missing := tuple(sorted({m for cell in cells if not here(m := cell.model.get("name", ""))})):
        return Estimate(sum(counts), done, None, None, "", None, missing)
    groups: dict[str, list[config.Cell]] = {}
    for run in runs:
        groups.setdefault(run.cell.group, []).append(run.cell)
    looks: dict[str, tuple] = {}
    seen = [look(group, looks) for group in groups.values()]
    traces = programs(seen)
    left = {run.cell.run_id: (count - len(run.numbers())) / count for run, count in zip(runs, counts)}
    seconds, basis = duration(seen, left, history(out), sum(traces.values()))
    return Estimate(sum(counts), done, traces, seconds / 60, basis, round(sum(disk(group, left) for group in seen)))


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
    return Seen(cells, shape, task, batches, [cell.make_policies(shape) for cell in cells])


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
    """Of one batch: arrays, compressed as such arrays were seen to be, and rows as text."""
    m, B, n = group.model, len(batch.rows), batch.new_tokens
    slots = max(budgets(policies, max(map(len, batch.prompts)), n))
    kept = len(batch.prompts) * m.layers * m.kv_heads * slots * 4
    entropy = min(STEPS, n) * m.layers * B * m.heads * 4
    drift = n * m.layers * B * 4 if group.task.compares_logits else 0
    prompts = 4 * sum(map(len, batch.prompts))
    arrays = 0.25 * kept + 0.93 * (entropy + drift) + 0.4 * prompts + 280 * (5 + len(batch.prompts)) + B * n
    texts = len(json.dumps(list(batch.facts))) + B * (700 + (LISTS * 20 * n if group.task.compares_logits else 4 * n))
    return arrays + texts + 2 * (22 * n + 150)


# -------------------------------------------------------------------------------------------------------------- minutes


def history(out: Path) -> dict[str, dict[str, list[float]]]:
    """Of every (model, task) in a results folder: seconds of finished batches by policy, prefill's under "prefill"."""
    found: dict[str, dict[str, list[float]]] = {}
    for path in out.glob("*/*/config.toml"):
        lines = store.read_lines(path.parent / "metrics.jsonl")
        raw = parts.read_toml(path) if lines else {}
        if "task" not in raw:
            continue
        times = found.setdefault(json.dumps([raw["model"], raw["task"]], sort_keys=True), {"prefill": []})
        own = times.setdefault(_policy(raw), [])
        for line in (line for line in lines if "step_seconds" in line):
            times["prefill"].append(line["prefill_seconds"])
            own.append(line["fill_seconds"] + line["first_step_seconds"] + sum(line["step_seconds"]))
    return found


def _policy(raw: dict[str, Any]) -> str:
    return json.dumps([raw.get("policy"), raw.get("layers")], sort_keys=True)


def duration(groups: Sequence[Seen], left: dict[str, float], past: dict, traces: int) -> tuple[float, str]:
    """Seconds for what is left, and in words where they come from."""
    seconds, known, guessed, guess = 0.0, 0, 0, Arithmetic()
    for group in groups:
        count, cells = group.task.count(), group.cells
        most = max(left[cell.run_id] for cell in cells)
        times = past.get(json.dumps([cells[0].model, cells[0].task], sort_keys=True))
        if times is None:
            guessed += 1
            each = guess.batch(group.model, _weights(group.model), group.batches[0], len(cells))
            seconds += each * count * statistics.mean(left[cell.run_id] for cell in cells)
            continue
        known += len(times["prefill"])
        of = lambda cell, times=times: times.get(_policy(msgspec.to_builtins(cell))) or _others(times)
        seconds += count * most * statistics.median(times["prefill"])
        seconds += sum(count * left[cell.run_id] * statistics.mean(of(cell)) for cell in cells)
    if guessed == len(groups):
        return seconds + guess.program * traces * (max(left.values()) > 0), guess.words
    return seconds, f"times of {known} finished batches" + (f"; a guess for {guessed} of {len(groups)} groups" * (guessed > 0))


def _others(times: dict[str, list[float]]) -> list[float]:
    return [value for key, values in times.items() if key != "prefill" for value in values]


def _weights(m: ModelConfig) -> int:
    """Numbers in a model's matrices."""
    each = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads) + 3 * m.hidden * m.ffn
    return m.layers * each + m.vocab * m.hidden


def show(name: str, cells: Sequence[config.Cell], made: Estimate) -> None:
    """In lines: every cell, then the sums."""
    for cell in cells:
        print(f"{cell.run_id}  {cell.task['name']:12} seed {cell.seed}  {cell.label}")
    print(f"{name}: {len(cells)} cells, {made.batches} batches, {made.finished} of them finished")
    if made.traces is None or made.disk is None:
        print(f"programs, minutes and disk: unknown without {', '.join(made.missing)}; write kvlab fetch {made.missing[0]}")
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.traces.items())
    print(f"programs to compile: {sum(made.traces.values())} ({kinds})")
    print(f"minutes: {made.minutes:.1f} ({made.basis})")
    print(f"disk: {made.disk / 1e6:.1f} MB")
