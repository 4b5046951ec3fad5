"""Results on disk. Everything is written beside its place and renamed, so a file that exists is whole.

results/<experiment>/<run_id>/config.toml         written first
                              env.json            digests of code, weights, text and the files a cell names; versions
                              metrics.jsonl       a line per finished batch
                              samples/00000.json  rows of one batch (its presence means: finished)
                              samples/00000.npz   kept positions, prompt tokens, entropy
                              summary.json        written last (its presence means: done)
results/<experiment>/experiment.toml              the experiment as it was run, and how (see `config.Origin`); runs as it stands
results/<experiment>/table.parquet                a row per cell
results/<experiment>/check.json                   what `kvlab check` found
results/<experiment>/ranking.json                 where layers were sparse one at a time (see `kvlab.experiment.ranking`)
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvlab import parts
from kvlab.errors import ResultsError
from kvlab.experiment.config import Cell, Experiment, Origin

EXPERIMENT, CHECK = "experiment.toml", "check.json"


@contextmanager
def writing(path: Path):
    """A temporary path that becomes `path` when the block ends well. Errors: ResultsError for a full or read-only disk."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except OSError as error:
        why = f"cannot write {path}: {error.strerror or error}"
        raise ResultsError(f"{why}; finished batches are kept, so free space or choose --out and run again") from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")


class Run:
    """The folder of one cell."""

    def __init__(self, folder: Path, cell: Cell):
        self.folder = folder / cell.run_id
        self.cell = cell

    def open(self, env: dict[str, Any], accept_stale: bool = False, fresh: bool = False) -> None:
        """Creates the folder, or checks that what is in it was made by the same code, weights, text and files."""
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        about = self.folder / "env.json"
        if about.exists() and not accept_stale:
            check_same(self.folder, read_json(about), env)
        if not about.exists():
            import tomli_w

            write_text(self.folder / "config.toml", tomli_w.dumps(msgspec.to_builtins(self.cell)))
            write_text(about, json.dumps(env, indent=1))

    def _batch(self, index: int) -> Path:
        return self.folder / "samples" / f"{index:05d}.json"

    def has(self, index: int) -> bool:
        return self._batch(index).exists()

    def batch(self, index: int) -> dict:
        """A finished batch."""
        return read_json(self._batch(index))

    def write(self, index: int, rows: list[dict], arrays: dict[str, np.ndarray], timing: dict) -> None:
        with writing(self._batch(index).with_suffix(".npz")) as part, open(part, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        write_text(self._batch(index), json.dumps({"rows": rows, "timing": timing}))
        try:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps({"batch": index, **timing}) + "\n")
        except OSError as error:
            raise ResultsError(f"cannot write {self.folder / 'metrics.jsonl'}: {error.strerror}") from error

    def batches(self) -> list[dict]:
        return [read_json(path) for path in sorted((self.folder / "samples").glob("*.json"))]

    def finish(self, summary: dict) -> None:
        write_text(self.folder / "summary.json", json.dumps(summary, indent=1))


def write_experiment(folder: Path, name: str, experiment: Experiment, origin: Origin, cells: Sequence[Cell]) -> None:
    """Writes experiment.toml before the cells run; what an earlier check found goes, for it was about other cells."""
    import tomli_w

    made = msgspec.structs.replace(origin, name=name, cells=[cell.run_id for cell in cells])
    tables = msgspec.to_builtins(msgspec.structs.replace(experiment, origin=made))
    write_text(folder / EXPERIMENT, tomli_w.dumps({key: value for key, value in tables.items() if value is not None}))
    (folder / CHECK).unlink(missing_ok=True)


def source(folder: Path) -> str:
    """The file that an experiment was read from, "" where its folder does not say. Errors: ConfigError."""
    path = folder / EXPERIMENT
    return parts.read_toml(path).get("origin", {}).get("source", "") if path.exists() else ""


def check_same(folder: Path, before: dict[str, Any], env: dict[str, Any]) -> None:
    """Refuses to build on what other code, weights, text, gate or ranking made. Errors: ResultsError."""
    for what in ("code", "weights", "text", "files"):
        if before.get(what, "") != env.get(what, ""):
            raise ResultsError(
                f"{folder} was made with other {what} ({str(before.get(what))[:12]} against {str(env.get(what))[:12]}); "
                "pass --accept-stale to build on it, --fresh to start over, or --out for another folder"
            )


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); remove its folder and run again") from error


def check_writable(folder: Path) -> None:
    """Fails before any work is done."""
    write_text(folder / ".writable", "")
    (folder / ".writable").unlink()
