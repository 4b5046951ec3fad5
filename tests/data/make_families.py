"""Remakes families/: tiny random checkpoints of every family, with what transformers makes of them (extra "peers").

python -m tests.data.make_families [NAME …]
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "families"
PROMPTS = (100, 61, 7)  # tokens; the first two are longer than any window below
STEPS = 64
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama3": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3}}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 12}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "num_key_value_heads": 1,
            "hidden_size": 32,
        },
    ),
}


def make(name: str):
    """A random model: norms and biases too, so that each of them matters (Gemma's layers beside its loud embedding)."""
    import torch
    import transformers

    family, own = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **own})
    torch.manual_seed(7)
    cls = transformers.Gemma3ForCausalLM if family == "Gemma3Text" else getattr(transformers, f"{family}ForCausalLM")
    model = cls._from_config(config, attn_implementation="eager").eval()
    for key, value in model.named_parameters():
        if value.ndim == 1:
            value.data.add_(0.3 * torch.randn(value.shape) + 2.0 * (".post_" in key and family == "Gemma3Text"))
    return model.to(torch.bfloat16)


def tokenizer():
    """Bytes: every token of the vocabulary is one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def golden(model):
    """Last logits and greedy tokens in fp32, each step computed anew over the whole sequence, without any cache."""
    import torch

    random, saved = np.random.default_rng(1), {}
    for i, length in enumerate(PROMPTS):
        ids = random.integers(0, 256, length).tolist()
        saved[f"prompt_{i}"] = np.array(ids, np.int32)
        for step in range(STEPS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            if step == 0:
                saved[f"logits_{i}"] = logits.numpy()
            ids.append(int(logits.argmax()))
        saved[f"tokens_{i}"] = np.array(ids[length:], np.int32)
    return saved


def main():
    import torch

    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    for name in sys.argv[1:] or FAMILIES:
        model = make(name)
        folder = HERE / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
        saved = golden(type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval())
        np.savez_compressed(folder / "golden.npz", **saved)
        print(name, json.dumps({k: v.tolist()[:6] for k, v in saved.items() if "tokens" in k}))


if __name__ == "__main__":
    main()
