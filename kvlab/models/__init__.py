"""Models: a configuration, a pytree of parameters and a tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

from kvlab.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
      params: a pure dict of fp32 arrays, as `kvlab.models.transformer.bind` takes it.
      digest: sha256 of the weights.
      stops: token ids that end a text.
      chat: the Jinja template of its conversations (see `kvlab.models.chat`), None if it has none.
    """

    name: str
    config: ModelConfig
    params: Any
    tokenizer: Any
    digest: str
    stops: tuple[int, ...] = ()
    chat: str | None = None


def load(name: str) -> Model:
    """A model by name (fetched on first use), by folder, by .gguf file or as "hf:org/name". Errors: ModelError."""
    from kvlab.models import chat, checkpoint, families, fetch
    from kvlab.models.tokenizer import Tokenizer

    folder = fetch.find(name)
    raw = checkpoint.read_json(folder / "config.json")
    config = families.to_config(raw, str(folder / "config.json"))
    digest = checkpoint.digest(folder)
    params = checkpoint.load(folder, config)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    stops, template = _stops(raw, folder), chat.template(folder)
    tokenizer.render = chat.renderer(template, tokenizer, stops) if template else None
    return Model(name, config, params, tokenizer, digest, stops, template)


def _stops(raw: dict, folder: Path) -> tuple[int, ...]:
    """Every id that config.json or generation_config.json names as the end."""
    from kvlab.models.checkpoint import read_json

    extra = folder / "generation_config.json"
    named = [raw.get("eos_token_id"), read_json(extra).get("eos_token_id") if extra.exists() else None]
    ids = [i for value in named for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
