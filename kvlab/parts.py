"""From a table of a config file to a part, a policy or a task: strict about names, keys and types."""

import dataclasses
import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvlab.codec import CODECS
from kvlab.errors import ConfigError, nearest
from kvlab.kernels import backends
from kvlab.layout import LAYOUTS
from kvlab.policy import Policy
from kvlab.retention import RETENTIONS
from kvlab.selection import SELECTIONS

KINDS: dict[str, tuple[Mapping[str, type], str]] = {
    "retention": (RETENTIONS, "keep_all"),
    "codec": (CODECS, "raw"),
    "layout": (LAYOUTS, "contiguous"),
    "selection": (SELECTIONS, "read_all"),
}

WORDS = ("implementation", "label")  # what a policy's table has besides parts


def build(table: Any, registry: Mapping[str, type], where: str) -> Any:
    """The object that `{name = "...", option = ...}` describes; `name` may be an import path "pkg.module:Class"."""
    if isinstance(table, str):
        table = {"name": table}
    if not isinstance(table, dict):
        raise ConfigError(f'{where}: {table!r} is no table; write {{name = "..."}}')
    if "name" not in table:
        if "kv" not in registry or not set(table) <= {"k", "v"}:
            raise ConfigError(f"{where}: no name; allowed: {', '.join(sorted(registry))}")
        table = {"name": "kv", **table}
    cls = find(table["name"], registry, where)
    given = {key: value for key, value in table.items() if key != "name"}
    values = options(given, cls, where, table["name"], registry)
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {table['name']}: {error}") from error


def options(given: dict[str, Any], cls: type, where: str, name: str, registry: Mapping[str, type] = {}) -> dict[str, Any]:  # noqa: B006
    """The fields of a dataclass from a table, strictly. Errors: ConfigError."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in given.items():
        if key not in fields:
            known = nearest(key, fields) if fields else "it has none"
            raise ConfigError(f"{where}: {name} has no option {key!r}; {known}")
        values[key] = _value(value, fields[key].type, registry, f"{where}.{key}")
    return values


def _value(value, kind, registry, where: str):
    if kind is Any:  # a part inside a part
        return build(value, registry, where) if isinstance(value, dict | str) else value
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} = {value!r}: {error}") from error


def find(name: Any, registry: Mapping[str, type], where: str) -> type:
    """A class by its registered name or by import path; a config's own folder and the working directory are searched."""
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name = {name!r} is no text")
    if ":" not in name:
        if name not in registry:
            raise ConfigError(f'{where}: no {name!r}; {nearest(name, registry)}, or an import path "package.module:Class"')
        return registry[name]
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported ({error}); allowed: package.module:Class") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{where}: {name!r} is no dataclass; decorate it with kvlab.core.part")
    return cls


def policy(table: dict[str, Any], where: str = "policy") -> Policy:
    """A policy from `{retention = {...}, codec = {...}, layout = {...}, selection = {...}, implementation = "..."}`.

    What is left out is plain.
    """
    for key in table:
        if key not in KINDS and key not in WORDS:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, [*KINDS, *WORDS])}")
    how = table.get("implementation", "xla")
    if reason := backends.unknown(how):
        raise ConfigError(f"{where}: {reason}")
    parts = {kind: build(table.get(kind, plain), registry, f"{where}.{kind}") for kind, (registry, plain) in KINDS.items()}
    return Policy(**parts, implementation=how)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a file. Errors: ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error


def read_policy(path: str | Path) -> dict[str, Any]:
    """The table of one policy from a TOML file: its parts at the top or under [policy]. Errors: ConfigError."""
    table, layers = read_layers(path)
    if layers:
        raise ConfigError(f"{path}: layers; here one policy serves all layers, leave them out")
    return table


def read_layers(path: str | Path) -> tuple[dict[str, Any], list[Any] | dict[str, Any]]:
    """As `read_policy`, and the file's `layers` (see `kvlab.experiment.layers`). Checked as far as parts go."""
    raw = read_toml(path)
    layers = raw.pop("layers", [])
    table = raw.pop("policy", None)
    if table is None:
        table, raw = raw, {}
    if raw or not isinstance(table, dict) or not isinstance(layers, list | dict):
        wrong = ", ".join(raw) or ("layers" if isinstance(table, dict) else "policy")
        raise ConfigError(f"{path}: {wrong}; allowed: the parts ({', '.join(KINDS)}) at the top or under [policy], and layers")
    policy(table, str(path))
    return table, layers


def describe(table: dict[str, Any]) -> str:
    """A policy's label: its own, or what differs from the full fp32 cache."""
    if "label" in table:
        return table["label"]
    words = [w for kind, (_, plain) in KINDS.items() if (w := _words(table.get(kind, plain))) not in (plain, "raw float32")]
    if (how := table.get("implementation", "xla")) != "xla":
        words = [*(words or ["full"]), f"{how} kernel"]
    return " + ".join(words) or "full"


def _words(part: Any) -> str:
    if isinstance(part, str):
        return part
    if "name" not in part:
        return " / ".join(f"{side.upper()} {_words(part[side])}" for side in ("k", "v") if side in part)
    options = (_option(key, value) for key, value in part.items() if key != "name")
    return " ".join([part["name"].rpartition(":")[2], *options])


def _option(key: str, value: Any) -> str:
    """A part inside a part stands as it would alone, and so does a text; a number needs its name."""
    return _words(value) if isinstance(value, str | dict) else f"{key} {value}"
