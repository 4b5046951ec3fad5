"""Real text that every installation has, from packages and the standard library, or a file of one's own."""

import ast
import functools
import hashlib
import re
import sysconfig
from collections import Counter
from importlib.metadata import files
from pathlib import Path

from kvlab.errors import ConfigError, nearest

PACKAGES = ("numpy", "pandas", "pyarrow", "scipy", "jax", "jaxlib", "safetensors", "matplotlib", "pillow", "typing_extensions")
SKIPPED = {"test", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo"}


@functools.cache
def documents(source: str) -> tuple[tuple[str, str], ...]:
    """(name, text) pairs in a fixed order.

    Args:
      source: "licences" (of the packages that kvlab itself depends on), "docstrings" (prose of the standard library, a
        document a module), "stdlib" (its code), or the path of a text file or of a folder of .txt files.
    """
    if source in SOURCES:
        return SOURCES[source]()
    path = Path(source).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.txt"))
    if not files:
        raise ConfigError(f"text={source!r}; {nearest(source, SOURCES)}, or the path of a text file or a folder of them")
    return tuple((file.name, file.read_text(encoding="utf-8")) for file in files)


def digest(source: str) -> str:
    """SHA-256 of the names and texts: results that depend on a text name it by this."""
    total = hashlib.sha256()
    for name, text in documents(source):
        for piece in (name, text):
            raw = piece.encode()
            total.update(len(raw).to_bytes(8, "little") + raw)
    return total.hexdigest()


def _modules():
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not SKIPPED.intersection(inside.parts):
            yield str(inside), path.read_text(encoding="utf-8", errors="replace")


def _stdlib():
    return tuple((name, code) for name, code in _modules() if len(code) > 2000)


def _docstrings():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for name, code in _modules():
        try:
            nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, kinds)]
        except SyntaxError:
            continue
        texts = [doc for doc in (ast.get_docstring(node) for node in nodes) if doc and len(doc) > 120]
        if sum(map(len, texts)) > 2000:
            found.append((name, "\n\n".join(texts)))
    return tuple(found)


def _licences():
    """Licence and notice files of our own dependencies, each paragraph once."""
    seen: set[str] = set()
    found = []
    for package in PACKAGES:
        for file in sorted(files(package) or (), key=str):
            if "licen" not in file.name.lower() and "notice" not in file.name.lower() and "licenses" not in file.parts:
                continue
            paragraphs = Path(str(file.locate())).read_text(encoding="utf-8", errors="replace").split("\n\n")
            new = [p for p in dict.fromkeys(paragraphs) if p not in seen]
            seen.update(new)
            if sum(map(len, new)) > 2000:
                found.append((f"{package}/{file.name}", "\n\n".join(new)))
    return tuple(found)


SOURCES = {"licences": _licences, "docstrings": _docstrings, "stdlib": _stdlib}


def token_stream(source: str, tokenizer, rng, length: int) -> list[int]:
    """At least `length` tokens of whole documents, in an order that `rng` draws."""
    texts = documents(source)
    ids: list[int] = []
    for i in rng.permutation(len(texts)):
        ids += tokenizer.encode(texts[i][1] + "\n\n")
        if len(ids) >= length:
            return ids
    raise ConfigError(f"text={source!r} has {len(ids)} tokens in all, {length} were asked for; shorten the task's length")


def long_documents(source: str, tokenizer, rng, length: int, count: int) -> list[tuple[str, list[int]]]:
    """The name and the first `length` tokens of `count` documents that `rng` draws. Errors: ConfigError for too few that long."""
    texts = documents(source)
    found: list[tuple[str, list[int]]] = []
    for i in rng.permutation(len(texts)):
        name, text = texts[i]
        ids = tokenizer.prompt(text) if len(text) > length else []
        if len(ids) >= length:
            found.append((name, ids[:length]))
        if len(found) == count:
            return found
    raise ConfigError(
        f"text={source!r} has {len(found)} documents of {length} tokens, {count} were asked for; lower contexts or length"
    )


@functools.cache
def counts(source: str) -> Counter[str]:
    """How often each word stands in the documents, in small letters."""
    return Counter(word for _, text in documents(source) for word in re.findall(r"[^\W\d_]+", text.lower()))


@functools.cache
def vocabulary(source: str) -> list[str]:
    """Plain words of four to nine letters that stand in the documents three times or more. Errors: ConfigError for too few."""
    found = sorted(w for w, n in counts(source).items() if n >= 3 and re.fullmatch("[a-z]{4,9}", w))
    if len(found) < 500:
        raise ConfigError(f"text={source!r} has {len(found)} words to draw from; give one with at least 500, such as 'licences'")
    return found


def insert(hay: list[int], pieces: list[list[int]], depth: float | None = None) -> tuple[list[int], list[int]]:
    """The tokens with the pieces among them, in their order, and the token at which each begins.

    Pieces are spread evenly, or all lie at `depth`, 0 … 1.
    """
    n = len(pieces)
    context: list[int] = []
    starts, done = [], 0
    for i, piece in enumerate(pieces):
        cut = int(((i + 0.5) / n if depth is None else depth) * len(hay))
        context += hay[done:cut]
        starts.append(len(context))
        context += piece
        done = cut
    return context + hay[done:], starts
