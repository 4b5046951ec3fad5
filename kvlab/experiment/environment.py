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
    """SHA-256 over the package's sources that can change a number."""
    root = Path(kvlab.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.parts[len(root.parts)] not in ("cli.py", "__main__.py", "bench", "claims", "report"):
            total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()
