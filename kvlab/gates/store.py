"""Gates on disk: one safetensors file, its configuration in the header."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvlab.errors import ConfigError, nearest
from kvlab.gates.base import Gate, GateParam
from kvlab.gates.importance import ImportanceGate
from kvlab.gates.lightning import LightningIndexer
from kvlab.gates.spatial import SpatialGate

GATES: dict[str, type[Gate]] = {"spatial": SpatialGate, "lightning": LightningIndexer, "importance": ImportanceGate}
G = TypeVar("G", bound=Gate)
SHIPPED = Path(__file__).parent / "shipped"


def kind_of(name: str) -> type[Gate]:
    """The class of a kind of gate. Errors: ConfigError."""
    if name not in GATES:
        raise ConfigError(f"gate: no {name!r}; {nearest(name, GATES)}")
    return GATES[name]


def make(kind: str, config: Any, seed: int = 0) -> Gate:
    """An untrained gate. Errors: ConfigError, also for a configuration of another kind."""
    cls = kind_of(kind)
    if not isinstance(config, cls.Config):
        raise ConfigError(f"gate: {kind} takes a {cls.Config.__name__}, not a {type(config).__name__}")
    return cls(config, seed)


def save(gate: Gate, path: str | Path, origin: dict[str, Any] | None = None, dtype: str = "float32") -> None:
    """Writes the parameters, and in the header the kind, the configuration and where they come from; whole or not at all.

    Args:
      dtype: of the numbers in the file, such as "float16" for half the bytes; in use they are float32 again.
    """
    from safetensors.numpy import save

    from kvlab.experiment.store import writing

    arrays = {name: np.asarray(x, dtype) for name, x in gate.values().items()}
    about = {"kind": gate.kind, **dataclasses.asdict(gate.config)}
    header = {"gate": json.dumps(about, sort_keys=True), "origin": json.dumps(origin or {}, sort_keys=True)}
    with writing(Path(path)) as part:
        part.write_bytes(save(arrays, header))


def find(name: str) -> Path:
    """The file of a gate: one that ships, by name, or a path. Errors: ConfigError."""
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.safetensors"))}
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"gate={name!r}: no such file; give the path of a .safetensors file, or one of {', '.join(shipped)}")
    return path


def load(name: str) -> Gate:
    """A gate by the name it ships under or by path. Errors: ConfigError."""
    path = find(name)
    return _load(str(path.resolve()), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _load(path: str, changed: int) -> Gate:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            about = json.loads((file.metadata() or {})["gate"])
            arrays = {key: jnp.asarray(file.get_tensor(key), jnp.float32) for key in file.keys()}
    except (SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"gate={path!r} is no gate that kvlab saved ({error}); train one with kvlab train") from error
    kind = about.pop("kind")
    gate = make(kind, kind_of(kind).Config(**about))
    wanted = {name: x.shape for name, x in gate.values().items()}
    if wanted != {name: x.shape for name, x in arrays.items()}:
        raise ConfigError(f"gate={path!r}: its arrays do not have the shapes of its configuration; train it again")
    with_values(gate, arrays)
    return gate


def origin(name: str) -> dict[str, Any]:
    """Where a saved gate comes from, as it was given to `save`."""
    from safetensors import safe_open

    with safe_open(find(name), "np") as file:
        return json.loads((file.metadata() or {}).get("origin", "{}"))


def with_values(gate: G, values: dict[str, Any]) -> G:
    """The gate itself with other parameters, which are named as in `Gate.counts`."""
    state = nnx.state(gate, GateParam)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(gate, state)
    return gate
