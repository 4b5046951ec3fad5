"""Several processes over one results folder, on one machine or on several that share a file system.

A lock is an `flock` on an empty file in `<results>/<experiment>/.locks/`: the system lets go of it when its holder ends, however
that came about, so nothing has to be cleared away. The files stay: whoever removed one could not know who waits for it.

    batches/<group>-<batch>   held by the one who computes a batch, for all cells that see its prompts
    folder                    held for a moment: to open a cell's folder, to add a line to a log
    present                   held, shared, by everyone who works here; alone by the one who discards
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import ResultsError

LOCKS = ".locks"


@contextmanager
def lock(folder: Path, name: str, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Holds a lock of a results folder during the block and gives whether it was got: always, where it waits.

    Errors: ResultsError where the lock's file cannot be made, or the file system has no locks.
    """
    path = folder / LOCKS / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error
    try:
        yield _take(file, path, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    finally:
        os.close(file)


def _take(file: int, path: Path, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ResultsError(
            f"{path} cannot be locked ({error.strerror}); choose a folder on a file system with flock by --out"
        ) from error
    return True


def exclusive(folder: Path):
    """The lock for what takes a moment: files of which there is one for everybody."""
    return lock(folder, "folder")


def at_work(folder: Path):
    """What a process that computes in a folder holds while it does."""
    return lock(folder, "present", shared=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """For discarding what is there. Errors: ResultsError while another process works in the folder."""
    with lock(folder, "present", wait=False) as mine:
        if not mine:
            raise ResultsError(f"another process works in {folder}; stop it first, run without --fresh, or choose another --out")
        yield


def batch(folder: Path, group: str, index: int):
    """The right to compute a batch of a group, not waited for."""
    return lock(folder, f"batches/{group}-{index:05d}", wait=False)


def busy(folder: Path, group: str, index: int) -> bool:
    """Whether somebody computes a batch at this moment."""
    with lock(folder, f"batches/{group}-{index:05d}", wait=False, shared=True) as free:
        return not free


def here() -> str:
    """This process, by a name that no other process on the same file system has."""
    return f"{socket.gethostname()}.{os.getpid()}"
