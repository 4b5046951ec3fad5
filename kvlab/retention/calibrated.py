"""What `kvlab calibrate` found out about a model's heads: files that ship, by the model's name, or anybody's, by path."""

from pathlib import Path

import numpy as np

from kvlab.errors import ConfigError

SHIPPED = Path(__file__).parent / "shipped"


def find(name: str) -> Path:
    """The file of a calibration. Errors: ConfigError."""
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.safetensors"))}
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        allowed = f"one of {', '.join(shipped)}, or the path of a file that kvlab calibrate writes"
        raise ConfigError(f"calibration {name!r}: no such file; give {allowed}")
    return path


def load(name: str, leaf: str, shape: tuple[int, ...]) -> np.ndarray:
    """One array of it. Errors: ConfigError where it is missing or another model's."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(find(name))[leaf]
    except (SafetensorError, KeyError) as error:
        raise ConfigError(f"calibration {name!r} holds no {leaf} ({error}); write it with kvlab calibrate") from error
    if found.shape != shape:
        raise ConfigError(
            f"{leaf} of calibration {name!r} has the shape {found.shape}, the model wants {shape}; calibrate that model"
        )
    return found
