"""What a result depends on besides its config."""

import functools
import hashlib
import platform
import time
from pathlib import Path

import jax

import kvlab
from kvlab.decode import Engine
from kvlab.experiment import config
from kvlab.tasks import Task

ELSEWHERE = (
    *("cli.py", "__main__.py", "bench/", "claims/", "locality/", "report/", "results.py", "plan/"),
    *("experiment/sweep/", "experiment/search/", "experiment/regression/", "experiment/report.py", "experiment/picture.py"),
)


def environment(engine: Engine, task: Task) -> dict[str, str]:
    """What a result depends on besides its config."""
    return {
        "code": code_digest(),
        "weights": engine.model.digest,
        "text": task.digest(),
        "kvlab": kvlab.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.machine()} {jax.default_backend()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def files_digest(cell: config.Cell) -> str:
    """SHA-256 over the gates and rankings that a cell names, "" where it names none. Errors: ConfigError."""
    found = sorted(cell.files())
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in found)).hexdigest() if found else ""


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's sources that can change a sample: not over what judges, shows or shares out samples."""
    root = Path(kvlab.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(ELSEWHERE):
            total.update(name.encode() + path.read_bytes())
    return total.hexdigest()
