"""What kvpress keeps of a prompt, with the scores it goes by (extra "peers"). kvpress calls a method a press.

Masks are `[L, H, T]`, True where a token stays; scores have the same shape.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvlab.bench import peers

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
LOCAL = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}


class Prompted(NamedTuple):
    """transformers' model after one prefill: what each layer's attention hands a press (local layers left out), and the cache."""

    model: Any
    ids: list[int]
    layers: list[tuple[Any, ...]]
    cache: Any


def tiny(family: str, folder: Path) -> None:
    """A random model of a family ("Llama", "Qwen2", "Gemma3") as a folder that both sides load; its tokens are bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    text = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{text}Config")(**SMALL, **(LOCAL if text != family else {}))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, value in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # or all keys would be of one length
            torch.nn.init.normal_(value, std=0.3)
    model.save_pretrained(folder)
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def prefill(name: str, ids: list[int], attention: str = "eager") -> Prompted:
    """One pass; some presses look at the attention that only "eager" gives. Errors: KvlabError without the extra.

    kvpress spares a model's local layers only where the model's class is one that it knows; here they never come to a press.
    """
    model = peers.load(name)
    model.set_attn_implementation(attention)
    at = passed(model, ids)
    if len(at.layers) < model.config.num_hidden_layers:
        _alone(model, [module for module, *_ in at.layers])
    return at


def passed(model, ids: list[int]) -> Prompted:
    """A prompt through transformers' model once, with what each layer hands a press; any number of presses may go by it."""
    import torch
    from kvpress.presses.base_press import BasePress
    from transformers import DynamicCache

    layers: list[tuple[Any, ...]] = []

    class Watch(BasePress):
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            if not getattr(module, "is_sliding", False):
                layers.append((module, hidden_states, keys, values, attentions, kwargs))
            return keys, values

    cache = DynamicCache()
    with Watch()(model):
        model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
    return Prompted(model, ids, layers, cache)


def _alone(model, modules: list[Any]) -> None:
    """Lets presses see a model of these layers alone: numbered among themselves, their kind's rotary embedding the only one."""
    model.config.num_hidden_layers = len(modules)
    for number, module in enumerate(modules):
        module.layer_idx = number
        rotary = functools.partial(module._modules.pop("rotary_emb"), layer_type=module.layer_type)
        module.rotary_emb = rotary


def press(name: str, ratio: float, filters=None) -> Any:
    """kvpress's counterpart of a method, at a ratio; `filters [L, H, D]` are what Q-filters go by."""
    import kvpress
    import torch

    class H2O(kvpress.ObservedAttentionPress):
        """Sums instead of means: its scores times the number of queries that saw a token."""

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen = torch.arange(keys.shape[2], 0, -1)
            return super().score(module, hidden_states, keys, values, attentions, kwargs) * seen

    def q_filters():
        made = kvpress.QFilterPress(ratio)
        made.q_filters = torch.tensor(np.asarray(filters))
        return made

    makers: dict[str, Callable[[], Any]] = {
        "window": lambda: kvpress.StreamingLLMPress(ratio),
        "key_norm": lambda: kvpress.KnormPress(ratio),
        "keydiff": lambda: kvpress.KeyDiffPress(ratio),
        "lagkv": lambda: kvpress.LagKVPress(ratio),
        "chunkkv(key_norm)": lambda: kvpress.ChunkKVPress(kvpress.KnormPress(ratio)),
        "q_filters": q_filters,
        "expected_attention": lambda: kvpress.ExpectedAttentionPress(ratio),
        "adakv(expected_attention)": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio)),
        "criticalkv(key_norm)": lambda: kvpress.CriticalKVPress(kvpress.KnormPress(ratio)),
        "criticalkv(snapkv)": lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio)),
        "snapkv": lambda: kvpress.SnapKVPress(ratio),
        "pyramidkv": lambda: kvpress.PyramidKVPress(ratio),
        "tova": lambda: kvpress.TOVAPress(ratio),
        "observed_attention": lambda: kvpress.ObservedAttentionPress(ratio),
        "h2o": H2O,
        "kvzip": lambda: kvpress.KVzipPress(ratio),
    }
    made = makers[name]()
    made.compression_ratio = ratio
    return made


def kept(press, at: Prompted, eager: bool):
    """The mask of what a press keeps, found by the keys that come back from it, and its scores."""
    scores: list[Any] = []
    scorer = press if hasattr(press, "score") else press.press
    original = scorer.score

    def score(*args):
        scores.append(original(*args))
        return scores[-1]

    scorer.score = score
    masks = []
    for module, hidden, keys, values, attentions, kwargs in at.layers:
        some = press.compress(module, hidden, keys, values, attentions if eager else None, kwargs)[0]
        masks.append([_found(old, new) for old, new in zip(keys[0], some[0])])
    return np.array(masks), np.stack([x[0].float().numpy() for x in scores])


def _found(old_TD, new_RD):
    """Which of the old rows are among the new ones, bit for bit."""
    place = {row.tobytes(): i for i, row in enumerate(old_TD.numpy())}
    mask = np.zeros(len(old_TD), bool)
    try:
        mask[[place[row.tobytes()] for row in new_RD.numpy()]] = True
    except KeyError:
        raise ValueError("a key that a press returned is none of those it was given") from None
    if mask.sum() != len(new_RD) or len(place) != len(mask):
        raise ValueError("equal keys at several positions: what a press kept of them cannot be told")
    return mask
