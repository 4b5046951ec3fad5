"""What is asked of a plan, from text: dimensions, sizes in bytes, policies. Errors are ConfigError unless said otherwise."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kvlab.errors import ConfigError, nearest
from kvlab.experiment import config
from kvlab.models.checkpoint import read_json
from kvlab.models.config import ModelConfig
from kvlab.plan import LIMIT, Dims, Plan, plan

NEEDED, INNER = ("layers", "kv_heads", "head_dim"), ("heads", "hidden", "ffn", "vocab")
LENGTH = 131_072  # of a prompt, unless it is given or the model's context is known
UNITS = {"": 1, "b": 1} | {f"{u}{b}": base**i for i, u in enumerate("kmgt", 1) for b, base in (("b", 1000), ("ib", 1024))}


def answer(
    model: str | None,
    dims: str | None,
    batch: int,
    length: int | None,
    new_tokens: int,
    policy: Sequence[str],
    dtype: str | None,
    memory: str | None,
    exact: bool,
) -> tuple[str, Plan]:
    """The policy's label and the plan that the command line asks for, from its options. Errors: KvlabError."""
    if (model is None) == (dims is None):
        raise ConfigError("give one of --model smollm2-135m and --dims layers=48,kv_heads=8,head_dim=128")
    rows, new = positive("--batch", batch), positive("--new-tokens", new_tokens, 0)
    there = None if memory is None else parse_bytes(memory)
    tokens = None if length is None else positive("--length", length)
    shape = read_dims(dims) if dims is not None else model_dims(str(model))
    if tokens is None:
        tokens = max((shape.context or LENGTH + new) - new, 1)
    label, policies = config.read_policies(policy, dtype, shape.config or shape.bare())
    return label, plan(shape, policies, rows, tokens, new, there, exact)


def model_dims(name: str) -> Dims:
    """The dimensions of a named model, a folder or a .gguf file, whose weights are not read. Errors: ModelError."""
    from kvlab.models import families, fetch

    path = fetch.find(name) / "config.json"
    return Dims.of(families.to_config(read_json(path), str(path)))


def read_dims(text: str) -> Dims:
    """Dimensions from "layers=48,kv_heads=8,head_dim=128"; heads, hidden, ffn, vocab (all four) and context may follow."""
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (x.strip() for x in item.partition("="))
        if key not in (*NEEDED, *INNER, "context"):
            raise ConfigError(f"--dims: unknown {key!r}; {nearest(key, [*NEEDED, *INNER, 'context'])}")
        if key in given:
            raise ConfigError(f"--dims: {key} is given twice; give it once")
        given[key] = positive(f"--dims {key}", value)
    if missing := [key for key in NEEDED if key not in given]:
        raise ConfigError(f"--dims: {', '.join(missing)} missing; write --dims layers=32,kv_heads=8,head_dim=128")
    if given.get("heads", given["kv_heads"]) % given["kv_heads"]:
        raise ConfigError(f"--dims: heads={given['heads']} is no multiple of kv_heads={given['kv_heads']}")
    context = given.get("context")
    config = ModelConfig(**{"context": LIMIT, **given}) if all(key in given for key in INNER) else None
    return Dims(given["layers"], given["kv_heads"], given["head_dim"], config, context)


def positive(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`."""
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name}={value}; allowed: a whole number of at least {least}")
    return number


def parse_bytes(text: str) -> int:
    """Bytes from "24GB" (powers of 1000), "24GiB" (powers of 1024) or plain digits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    number = int(Fraction(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if number < 1:
        raise ConfigError(f"memory size {text!r}; allowed: a positive number and kB, MB, GB, TB, KiB, MiB, GiB, TiB or nothing")
    return number
