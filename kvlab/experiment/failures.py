"""Cells that failed while the others went on: a file each, which the next run skips until it is told to try again.

results/<experiment>/<run_id>/error.txt    the error in one line, an empty line, the traceback
"""

import dataclasses
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import FailedCells, ResultsError
from kvlab.experiment import store
from kvlab.experiment.config import Cell

OURS = "kvlab.errors."  # what the user can mend


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is known of a failed cell: its error's class, with the module, its message, and where the traceback lies."""

    cell: Cell
    kind: str
    message: str
    path: Path

    @property
    def line(self) -> str:
        name = self.kind.rpartition(".")[2]
        return f"failed: {self.cell.label}, {self.cell.task['name']}, seed {self.cell.seed}: {name}: {self.message} ({self.path})"


@contextmanager
def kept(run: store.Run) -> Iterator[None]:
    """Writes down what goes wrong in the block, and goes on after it; what concerns the folder itself stays an error."""
    try:
        yield
    except ResultsError:
        raise
    except Exception as error:
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        line = " ".join(str(error).split()) or "no message"
        run.fail(f"{kind}: {line}\n\n{''.join(traceback.format_exception(error))}")


def found(cells: Sequence[Cell], folder: Path) -> list[Failure]:
    """Those of the cells that failed, in their order."""
    return [each for cell in cells if (each := _read(store.Run(folder, cell))) is not None]


def _read(run: store.Run) -> Failure | None:
    try:
        first, _, _ = run.error.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:  # it has not failed, or another process is told to try it again
        return None
    kind, _, message = first.partition(": ")
    return Failure(run.cell, kind, message, run.error)


def forget(cells: Sequence[Cell], folder: Path) -> None:
    """Has them tried again."""
    for each in found(cells, folder):
        store.Run(folder, each.cell).forget()


def announce(skipped: Sequence[Failure]) -> None:
    """Says what is not tried, and how it would be."""
    if skipped:
        print(f"skipping {len(skipped)} cells that failed before; --retry tries them again", file=sys.stderr)


def conclude(failed: Sequence[Failure], total: int, frame=None) -> None:
    """Lists what failed, a line each, and raises one error for all of it. `frame` is the table of the others."""
    if not failed:
        return
    first, code = failed[0], 2 if all(each.kind.startswith(OURS) for each in failed) else 1
    if total == 1:
        raise FailedCells(f"{first.message} ({first.path}; --retry tries it again)", code, frame)
    for each in failed:
        print(each.line, file=sys.stderr)
    raise FailedCells(f"{len(failed)} of {total} cells failed, first: {first.message}; --retry tries them again", code, frame)


def raise_found(cells: Sequence[Cell], folder: Path) -> None:
    """Speaks of the cells that failed, without a table. Errors: FailedCells."""
    conclude(found(cells, folder), len(cells))
