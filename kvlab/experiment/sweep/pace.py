"""How long cells would take: as finished batches of the same model and task took, or by a guess."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvlab import parts
from kvlab.decode import bucket
from kvlab.experiment import config, store
from kvlab.models.config import ModelConfig
from kvlab.tasks import Batch, Task


@dataclasses.dataclass(frozen=True)
class Seen:
    """A group of cells as far as it is looked at: the model's shape, a few batches, every cell's policies; `failing` says of
    other cells why their policies cannot be made."""

    cells: list[config.Cell]
    model: ModelConfig
    task: Task
    batches: list[Batch]
    policies: list[tuple]
    failing: list[str]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A machine by four figures: operations and bytes a second that one process gets done, seconds to compile a program, and
    seconds that each batch of a cell takes besides its steps: figures taken, files written."""

    operations: float = 4e10
    bytes: float = 8e9
    program: float = 3.0
    besides: float = 0.5

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
        return prefill / self.operations + policies * (self.besides + batch.new_tokens * step)


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
            own.append(line.get("seconds", line["fill_seconds"] + line["first_step_seconds"] + sum(line["step_seconds"])))
    return found


def _policy(raw: dict[str, Any]) -> str:
    return json.dumps([raw.get("policy"), raw.get("layers")], sort_keys=True)


def duration(groups: Sequence[Seen], left: dict[str, float], past: dict, traces: int) -> tuple[float, str]:
    """Seconds for what is left, and in words where they come from."""
    seconds, known, guessed, guess = 0.0, 0, 0, Arithmetic()
    first: dict[tuple, float] = {}  # of each task and policy the longest batch, once: it compiled
    for group in groups:
        count, cells = group.task.count(), group.cells
        most = max(left[cell.run_id] for cell in cells)
        key = json.dumps([cells[0].model, cells[0].task], sort_keys=True)
        times = past.get(key)
        if times is None or not times["prefill"]:
            guessed += 1
            each = guess.batch(group.model, _weights(group.model), group.batches[0], len(cells))
            seconds += each * count * statistics.mean(left[cell.run_id] for cell in cells)
            continue
        known += len(times["prefill"])
        of = lambda cell, times=times: times.get(_policy(msgspec.to_builtins(cell))) or _others(times)
        compared = group.task.compares_logits or group.task.compares_answers  # then the full cache answers once more
        seconds += count * most * (statistics.median(times["prefill"]) + compared * statistics.median(_others(times)))
        seconds += sum(count * left[cell.run_id] * statistics.median(of(cell)) for cell in cells)
        first |= {(key, _policy(msgspec.to_builtins(cell))): max(of(cell)) for cell in cells if left[cell.run_id]}
    if guessed == len(groups):
        return seconds + guess.program * traces * (max(left.values()) > 0), guess.words
    seconds += sum(first.values())
    return seconds, f"times of {known} finished batches" + (f"; a guess for {guessed} of {len(groups)} groups" * (guessed > 0))


def _others(times: dict[str, list[float]]) -> list[float]:
    return [value for key, values in times.items() if key != "prefill" for value in values]


def _weights(m: ModelConfig) -> int:
    """Numbers in a model's matrices."""
    each = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads) + 3 * m.hidden * m.ffn
    return m.layers * each + m.vocab * m.hidden
