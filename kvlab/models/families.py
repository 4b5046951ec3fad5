"""From a Hugging Face config.json to a `ModelConfig`: a family is a small function, and what none understands is an error.

A key that a family does not read may only be empty, false or one of HARMLESS: a model that needs it would load and be
subtly wrong.
"""

from collections.abc import Callable
from typing import Any

from kvlab.errors import ModelError
from kvlab.models.config import ModelConfig, RopeScaling

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ATTENTION = ("full_attention", "sliding_attention")
HARMLESS = set(
    """_name_or_path architectures attention_dropout auto_map bos_token_id cache_implementation chat_template
    chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_llama_config label2id max_window_layers
    model_type pad_token_id pretraining_tp return_dict sliding_window torch_dtype transformers.js_config
    transformers_version unk_token_id unsloth_fixed unsloth_version use_cache""".split()
)


class Raw:
    """A config.json that remembers which of its keys were read."""

    def __init__(self, table: dict[str, Any], where: str):
        self.table = table
        self.where = where
        self.seen: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is missing or null."""
        self.seen.add(key)
        value = self.table.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self(key)
        if value is None:
            raise ModelError(f"{self.where} has no {key}; is it the config.json of a causal language model?")
        return value

    def refuse(self, what: str, allowed) -> ModelError:
        return ModelError(f"{self.where}: {what}; allowed: {', '.join(map(str, sorted(allowed)))}")

    def check_rest(self) -> None:
        for key, value in self.table.items():
            if value and key not in self.seen | HARMLESS:
                raise ModelError(
                    f"{self.where}: {key} = {str(value)[:60]} means something that kvlab's {self.table['model_type']!r} "
                    "does not do; allowed: a plain checkpoint without it"
                )


def to_config(table: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The model's shape. Errors: ModelError for a family, an option or a value that kvlab does not know."""
    raw = Raw(table, where)
    kind = raw("model_type")
    if kind not in FAMILIES:
        raise raw.refuse(f"model_type {kind!r} is unknown", FAMILIES)
    config = FAMILIES[kind](raw)
    raw.check_rest()
    if config.windows and len(config.windows) != config.layers:
        raise ModelError(f"{where}: layer_types names {len(config.windows)} layers of {config.layers}")
    return config


# -------------------------------------------------------------------------------------------------------- the families


def llama(raw: Raw) -> ModelConfig:
    """Llama 2 and 3 (https://arxiv.org/abs/2407.21783), and SmolLM2, which is one."""
    return _common(raw)


def mistral(raw: Raw) -> ModelConfig:
    """Mistral (https://arxiv.org/abs/2310.06825): every layer local where there is a window."""
    window = raw("sliding_window")
    return _common(raw, windows=() if window is None else (window,) * raw.need("num_hidden_layers"))


def qwen2(raw: Raw) -> ModelConfig:
    """Qwen 2 and 2.5 (https://arxiv.org/abs/2407.10671): biases on queries, keys and values."""
    return _common(raw, windows=_qwen_windows(raw), qkv_bias=True)


def qwen3(raw: Raw) -> ModelConfig:
    """Qwen 3 (https://arxiv.org/abs/2505.09388): normalised queries and keys, a head dimension of its own."""
    return _common(raw, windows=_qwen_windows(raw), qk_norm=True)


def gemma3(raw: Raw) -> ModelConfig:
    """Gemma 3, text only (https://arxiv.org/abs/2503.19786): local layers with a rotary base of their own."""
    layers, hidden = raw.need("num_hidden_layers"), raw.need("hidden_size")
    pattern = raw("sliding_window_pattern", raw("_sliding_window_pattern", 6))
    kinds = raw("layer_types") or [ATTENTION[(i + 1) % pattern != 0] for i in range(layers)]
    base, scaling = _rope(raw, 1e6, "full_attention")
    local, stretched = _rope(raw, 1e4, "sliding_attention")
    if stretched is not None:
        raise raw.refuse(f"local layers have a scaled rotary embedding ({stretched.kind})", ["default"])
    return _common(
        raw,
        activation=_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=raw("rope_local_base_freq", local),
        windows=_windows(raw, kinds),
        softcap=raw("attn_logit_softcapping"),
        logit_softcap=raw("final_logit_softcapping"),
        scale=float(raw("query_pre_attn_scalar", 256)) ** -0.5,
        tied=raw("tie_word_embeddings", True),
        qk_norm=True,
        post_norms=True,
        unit_norms=True,
        embedding_scale=float(hidden) ** 0.5,
    )


FAMILIES: dict[str, Callable[[Raw], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3_text": gemma3,
}


# ------------------------------------------------------------------------------------------------------ what they share


def _common(raw: Raw, **own: Any) -> ModelConfig:
    heads, hidden = raw.need("num_attention_heads"), raw.need("hidden_size")
    if "rope_base" not in own:
        own["rope_base"], own["rope_scaling"] = _rope(raw, 1e4)
    if "activation" not in own:
        own["activation"] = _activation(raw, "hidden_act", "silu")
    return ModelConfig(
        layers=raw.need("num_hidden_layers"),
        hidden=hidden,
        ffn=raw.need("intermediate_size"),
        heads=heads,
        kv_heads=raw("num_key_value_heads", heads),
        head_dim=raw("head_dim", hidden // heads),
        vocab=raw.need("vocab_size"),
        context=raw.need("max_position_embeddings"),
        norm_eps=raw.need("rms_norm_eps"),
        **{"tied": raw("tie_word_embeddings", False), **own},
    )


def _activation(raw: Raw, key: str, default: str) -> str:
    name = raw(key, default)
    if name not in ACTIVATIONS:
        raise raw.refuse(f"{key} {name!r} is unknown", ACTIVATIONS)
    return ACTIVATIONS[name]


def _qwen_windows(raw: Raw) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on are local where the window is switched on."""
    kinds, layers = raw("layer_types"), raw.need("num_hidden_layers")
    if not kinds and raw("use_sliding_window", False):
        kinds = [ATTENTION[i >= raw("max_window_layers", 28)] for i in range(layers)]
    return _windows(raw, kinds or ATTENTION[:1] * layers)


def _windows(raw: Raw, kinds) -> tuple[int | None, ...]:
    if unknown := set(kinds) - set(ATTENTION):
        raise raw.refuse(f"layer_types has {sorted(unknown)}", ATTENTION)
    if ATTENTION[1] not in kinds:
        return ()
    return tuple(raw.need("sliding_window") if kind == ATTENTION[1] else None for kind in kinds)


def _rope(raw: Raw, base: float, kind: str = "") -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters` (by kind of layer)."""
    new = raw("rope_parameters", {})
    if new:
        table = new.get(kind) or ({} if ATTENTION[0] in new else new)
        base = table.get("rope_theta") or base
    else:
        table = {} if kind == ATTENTION[1] else raw("rope_scaling", {})
        base = base if kind == ATTENTION[1] else raw("rope_theta", base)
    name = table.get("rope_type", table.get("type", "default"))
    if name not in SCALINGS:
        raise raw.refuse(f"rope type {name!r} is unknown", SCALINGS)
    try:
        return float(base), SCALINGS[name](table)
    except KeyError as error:
        raise ModelError(f"{raw.where}: rope type {name!r} needs {error.args[0]}, which is missing") from None


SCALINGS: dict[str, Callable[[dict], RopeScaling | None]] = {
    "default": lambda table: None,
    "linear": lambda table: RopeScaling("linear", float(table["factor"])),
    "llama3": lambda table: RopeScaling(
        "llama3",
        float(table["factor"]),
        float(table["low_freq_factor"]),
        float(table["high_freq_factor"]),
        int(table["original_max_position_embeddings"]),
    ),
}
