"""Parameters from the safetensors files of a folder, memory-mapped, under a checkpoint's usual names."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import ModelError
from kvlab.models.config import ModelConfig

UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")  # tables that follow from the config, and the copy of a tied head


def files(folder: Path) -> list[Path]:
    """The folder's weight files: model.safetensors, or the shards of its index. Errors: ModelError if one is missing."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        return [whole]
    if not index.exists():
        raise ModelError(f"{folder} has no model.safetensors (nor an index of shards); only safetensors files are read")
    found = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    missing = [path.name for path in found if not path.exists()]
    if missing or not found:
        raise ModelError(f"{folder} lacks {', '.join(missing) or 'all shards'} of its index; fetch the folder again")
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); run: kvlab fetch NAME --again") from error


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(folder: Path) -> str:
    """SHA-256 of the weights: the file's, or that of the shards' names and digests.

    A folder that kvlab made says in source.json what it must be. Errors: ModelError where it is another.
    """
    found = files(folder)
    if len(found) > 1:
        return hashlib.sha256("".join(f"{p.name} {sha256(p)}\n" for p in found).encode()).hexdigest()
    got, source = sha256(found[0]), folder / "source.json"
    if source.exists() and read_json(source).get("model.safetensors") != got:
        raise ModelError(f"{found[0]} is truncated or corrupt (its digest is another); run: kvlab fetch {folder.name} --again")
    return got


@contextlib.contextmanager
def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Every stored tensor by name, as a function that reads it. Errors: ModelError for a truncated file."""
    import ml_dtypes  # noqa: F401  numpy learns bfloat16 from it
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}
        for path in files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is truncated or corrupt ({error}); fetch it again") from error
            found |= {name: file for name in file.keys()}  # noqa: SIM118
        yield found


def load(folder: Path, config: ModelConfig) -> dict:
    """Parameters as `kvlab.models.transformer.bind` takes them, fp32. Errors: ModelError.

    Stored as fp32, fp16 or bf16; tensors that the configuration has no place for are an error, as are missing ones.
    """
    with _tensors(folder) as found:
        left = {name for name in found if not name.endswith(UNUSED)}

        def get(name: str):
            if name not in found:
                raise ModelError(f"{folder} holds no tensor {name!r}; it is not what its config.json says")
            left.discard(name)
            value = found[name].get_tensor(name)
            if value.dtype.name not in ("float32", "float16", "bfloat16"):
                raise ModelError(f"{folder}: {name} is stored as {value.dtype}; allowed: float32, float16, bfloat16")
            return value.astype(np.float32)

        params = _assemble(get, config)
    if left:
        raise ModelError(f"{folder} holds tensors that its config.json does not call for: {', '.join(sorted(left)[:3])} …")
    _check_shapes(folder, params, config)
    return params


def _assemble(get, config: ModelConfig) -> dict:
    import jax.numpy as jnp

    def norm(name):
        return {"scale": jnp.asarray(get(f"{name}.weight") + np.float32(config.unit_norms))}

    def join(prefix, names, leaf="weight"):
        return jnp.asarray(np.concatenate([get(f"{prefix}.{n}_proj.{leaf}") for n in names]))

    def block(at):
        before_ffn = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        made = {
            "attention_norm": norm(f"{at}.input_layernorm"),
            "qkv": join(f"{at}.self_attn", "qkv"),
            "out": join(f"{at}.self_attn", "o"),
            "ffn_norm": norm(f"{at}.{before_ffn}"),
            "gate_up": join(f"{at}.mlp", ("gate", "up")),
            "down": join(f"{at}.mlp", ("down",)),
        }
        if config.qkv_bias:
            made["qkv_bias"] = join(f"{at}.self_attn", "qkv", "bias")
        if config.qk_norm:
            made |= {"query_norm": norm(f"{at}.self_attn.q_norm"), "key_norm": norm(f"{at}.self_attn.k_norm")}
        if config.post_norms:
            made["attention_post_norm"] = norm(f"{at}.post_attention_layernorm")
            made["ffn_post_norm"] = norm(f"{at}.post_feedforward_layernorm")
        return made

    params = {
        "embedding": jnp.asarray(get("model.embed_tokens.weight")),
        "blocks": {i: block(f"model.layers.{i}") for i in range(config.layers)},
        "norm": norm("model.norm"),
    }
    return params if config.tied else {**params, "head": jnp.asarray(get("lm_head.weight"))}


def _check_shapes(folder: Path, params: dict, config: ModelConfig) -> None:
    import jax
    from flax import nnx

    from kvlab.models.transformer import skeleton

    want = dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(skeleton(config)[1])))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.shape != want[path].shape:
            where = jax.tree_util.keystr(path)
            raise ModelError(f"{folder}: {where} has shape {leaf.shape}, config.json asks for {want[path].shape}")
