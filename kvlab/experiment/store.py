"""Results on disk. Everything is written beside its place and renamed, so a file that exists is whole.

results/<experiment>/<run_id>/config.toml         written first
                              env.json            digests of code, weights, text and the files a cell names; versions
                              metrics.jsonl       a line per finished batch
                              samples/00000.json  rows of one batch (its presence means: finished)
                              samples/00000.npz   kept positions, prompt tokens, token ids of the answers, entropy
                              error.txt           why the cell failed, where it did (see `kvlab.experiment.failures`)
                              summary.json        written last (its presence means: done)
results/<experiment>/experiment.toml              the experiment as it was run, and how (see `config.Origin`); runs as it stands
results/<experiment>/table.parquet                a row per cell
results/<experiment>/samples.parquet              a row per sample, scalars only
results/<experiment>/search.json                  what `kvlab run --search` found, and search.png
results/<experiment>/check.json                   what `kvlab check` found
results/<experiment>/ranking.json                 where layers were sparse one at a time (see `kvlab.experiment.ranking`)
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvlab import parts
from kvlab.errors import ResultsError
from kvlab.experiment import sharing
from kvlab.experiment.config import Cell, Experiment, Origin

EXPERIMENT, CHECK = "experiment.toml", "check.json"

SAME = ("code", "weights", "text", "files", "jax", "platform")  # what results must have in common to be built on


@contextmanager
def writing(path: Path):
    """A temporary path that becomes `path` when the block ends well. Errors: ResultsError for a full or read-only disk."""
    part = path.with_name(f".{path.name}.{sharing.here()}.part")
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

    def __init__(self, folder: Path, cell: Cell, name: str = ""):
        self.folder = folder / (name or cell.run_id)
        self.cell = cell
        self.error = self.folder / "error.txt"
        self._made = ""

    def open(self, env: dict[str, Any], accept_stale: bool = False) -> None:
        """Creates the folder, or checks that what is in it was made by the same code, weights, text and files."""
        about, self._made = self.folder / "env.json", made_by(env)
        with sharing.exclusive(self.folder.parent):
            if not accept_stale:
                if about.exists():
                    check_same(self.folder, read_json(about), env)
                self._check_merged()  # batches may lie there without it
            if not about.exists():
                self._describe()
                write_text(about, json.dumps(env, indent=1))

    def _describe(self) -> None:
        import tomli_w

        write_text(self.folder / "config.toml", tomli_w.dumps(msgspec.to_builtins(self.cell)))

    def _check_merged(self) -> None:
        """Refuses batches that came from elsewhere, by copying folders over one another. Errors: ResultsError."""
        for index in self.numbers():
            if self.batch(index).get("made", self._made) != self._made:
                raise ResultsError(
                    f"{self._batch(index)} was made with other code, weights, text or files than its folder says; "
                    "remove it, pass --accept-stale to build on it, or --fresh to start over"
                )

    @property
    def failed(self) -> bool:
        return self.error.exists()

    def fail(self, text: str) -> None:
        """Writes down why the cell failed."""
        self._describe()
        write_text(self.error, text)

    def forget(self) -> None:
        """Has a failed cell tried again; by whatever code there is by now, where nothing of it was finished."""
        self.error.unlink(missing_ok=True)
        if not self.numbers():
            (self.folder / "env.json").unlink(missing_ok=True)

    def _batch(self, index: int) -> Path:
        return self.folder / "samples" / f"{index:05d}.json"

    def numbers(self) -> list[int]:
        """The finished batches. By listing: on network file systems a file that was missing may be remembered as missing."""
        try:
            names = os.listdir(self.folder / "samples")
        except FileNotFoundError:
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())

    def has(self, index: int) -> bool:
        return index in self.numbers()

    def batch(self, index: int) -> dict:
        """A finished batch."""
        return read_json(self._batch(index))

    def write(self, index: int, rows: list[dict], arrays: dict[str, np.ndarray], timing: dict) -> None:
        """Finishes a batch; its caller is the only one at it."""
        for torn in (self.folder / "samples").glob(f".{index:05d}.*.part"):
            torn.unlink(missing_ok=True)  # of a process that was killed
        with writing(self._batch(index).with_suffix(".npz")) as part, open(part, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        with sharing.exclusive(self.folder.parent):
            write_text(self._batch(index), json.dumps({"rows": rows, "timing": timing, "made": self._made}))
            self._log([{"batch": index, **timing}])

    def _log(self, lines: list[dict]) -> None:
        """Adds lines to the log; the caller holds the folder's lock."""
        path = self.folder / "metrics.jsonl"
        try:
            torn = path.exists() and not path.read_bytes().endswith(b"\n")  # a process was killed while it wrote
            with open(path, "a", encoding="utf-8") as log:
                log.write("\n" * torn + "".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise ResultsError(f"cannot write {path}: {error.strerror}") from error

    def batches(self) -> list[dict]:
        return [self.batch(index) for index in self.numbers()]

    def rows(self) -> Iterator[tuple[tuple[int, int], dict]]:
        """((batch, sample), row) of all that is finished."""
        return (((index, i), row) for index in self.numbers() for i, row in enumerate(self.batch(index)["rows"]))

    def finish(self, summary: dict) -> None:
        """Writes the summary, and into the log what a kill, or copying folders over one another, took out of it."""
        with sharing.exclusive(self.folder.parent):
            logged = {line.get("batch") for line in read_lines(self.folder / "metrics.jsonl")}
            self._log([{"batch": i, **self.batch(i)["timing"]} for i in self.numbers() if i not in logged])
        write_text(self.folder / "summary.json", json.dumps(summary, indent=1))


def made_by(env: dict[str, Any]) -> str:
    """What results must have in common, in one word."""
    return hashlib.sha256("".join(f"{env.get(what, '')} " for what in SAME).encode()).hexdigest()[:16]


def discard(folder: Path, cells: Iterable[Cell]) -> None:
    """Removes what cells have so far. Errors: ResultsError while another process works in the folder."""
    with sharing.alone(folder):
        for path in (folder / cell.run_id for cell in cells):
            try:
                if path.exists():
                    shutil.rmtree(path)
            except OSError as error:  # what stayed would be taken for finished
                raise ResultsError(f"cannot remove {path}: {error.strerror or error}; choose another --out") from error


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
    for what in SAME:
        if before.get(what, "") != env.get(what, ""):
            raise ResultsError(
                f"{folder} was made with other {what} ({str(before.get(what))[:12]} against {str(env.get(what))[:12]}); "
                "pass --accept-stale to build on it, --fresh to start over, or --out for another folder"
            )


def plain(figures: Any) -> Any:
    """The same with None for what is infinite or no number, which JSON does not have."""
    if isinstance(figures, dict):
        return {key: plain(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [plain(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); remove it and run again") from error


def read_lines(path: Path) -> list[dict]:
    """The objects in a file that has one a line; none where there is no file, and what is torn is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def check_writable(folder: Path) -> None:
    """Fails before any work is done."""
    write_text(folder / ".writable", "")
    (folder / ".writable").unlink(missing_ok=True)  # another process may have been quicker
