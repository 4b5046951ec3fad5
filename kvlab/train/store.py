"""Training on disk: a folder that a killed run can be continued from.

results/train/<name>/config.toml      written first; a folder of another config is refused
                     env.json         digest of code, versions
                     metrics.jsonl    a line per logged step, in order, each once
                     checkpoints/     the newest state (Orbax), saved every `save` steps
                     model/           the exported model, which `kvlab.models.load` reads
                     summary.json     written last (its presence means: done)
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from kvlab.errors import ResultsError
from kvlab.experiment.store import check_same, read_json, write_text

S = TypeVar("S")
GATE = "gate.safetensors"  # of a training that ends in a gate


class Folder:
    """The folder of one training. Use as a context: leaving it closes the checkpoints."""

    def __init__(self, path: Path, training: Any, env: dict[str, Any], accept_stale: bool = False, fresh: bool = False):
        self.path = path.resolve()
        self.metrics = self.path / "metrics.jsonl"
        if fresh:
            shutil.rmtree(self.path, ignore_errors=True)
        self._open(tomli_w.dumps(_plain(training)), env, accept_stale)
        self._manager = _manager(self.path / "checkpoints")

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error) -> None:
        self._manager.close()

    def _open(self, config: str, env: dict[str, Any], accept_stale: bool) -> None:
        about = self.path / "config.toml"
        if about.exists() and about.read_text(encoding="utf-8") != config:
            raise ResultsError(f"{self.path} holds a training of another config; --fresh discards it, --out names another folder")
        if (self.path / "env.json").exists():
            if not accept_stale:
                check_same(self.path, read_json(self.path / "env.json"), env)
        else:
            write_text(about, config)
            write_text(self.path / "env.json", json.dumps(env, indent=1))

    def summary(self) -> dict[str, Any] | None:
        """What a finished training wrote, None before that."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(summary, indent=1))

    def newest(self) -> int:
        """The newest checkpoint's step, 0 if there is none."""
        return self._manager.latest_step() or 0

    def restore(self, state: S) -> tuple[int, S]:
        """The newest checkpoint's step and state (0 and the given one if there is none); the log is cut back to it."""
        import orbax.checkpoint as ocp

        step = self.newest()
        if step:
            try:
                state = self._manager.restore(step, args=ocp.args.StandardRestore(state))
            except (ValueError, OSError) as error:
                raise ResultsError(f"{self.path}: checkpoint {step} cannot be read ({error}); start over with --fresh") from error
        self._cut_log(step)
        return step, state

    def save(self, step: int, state: Any) -> None:
        """Returns once the checkpoint is whole; older ones go."""
        import orbax.checkpoint as ocp

        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()
        except OSError as error:
            raise ResultsError(f"cannot write {self.path}: {error.strerror or error}; free space and run again") from error

    def log(self, line: dict[str, Any]) -> None:
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint must not outlive the lines before it
        except OSError as error:
            raise ResultsError(f"cannot write {self.metrics}: {error.strerror}") from error

    def lines(self) -> list[dict[str, Any]]:
        """The log's lines so far, without one that was cut off."""
        text = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _cut_log(self, step: int) -> None:
        """Drops lines after the step, which will be written again."""
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step))


def _plain(training: Any) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(training))


def _manager(path: Path):
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    return ocp.CheckpointManager(path, options=options)
