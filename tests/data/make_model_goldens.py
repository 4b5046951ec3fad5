"""Remakes smollm2_golden.npz or gemma3_golden.npz with transformers on the dequantised weights (needs the extra "peers").

python -m tests.data.make_model_goldens smollm2
KVLAB_ACCEPT_TERMS=gemma python -m tests.data.make_model_goldens gemma3
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np

from kvlab.bench.peers import Peer
from kvlab.models import load

HERE = Path(__file__).parent


def smollm2(tokenizer) -> list[list[int]]:
    """Six tokens, a chat turn, and 1,100 tokens of Python."""
    code = Path(sysconfig.get_paths()["stdlib"], "this.py").read_text()
    long = tokenizer.encode(code * 4)[:1100]
    texts = ["The capital city of France is", "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"]
    return [*(tokenizer.encode(t) for t in texts), long]


def gemma3(tokenizer) -> list[list[int]]:
    """Seven tokens, some Python, and 700 tokens of a licence: more than a local window."""
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    long = tokenizer.prompt((HERE.parent.parent / "LICENSE").read_text())[:700]
    return [tokenizer.prompt("The capital city of France is"), tokenizer.prompt(code), long]


MODELS = {"smollm2": ("smollm2-135m", smollm2, 8), "gemma3": ("gemma3-270m", gemma3, 64)}


def main(which: str):
    name, prompts, every = MODELS[which]  # of the logits, every eighth or 64th is kept
    peer, tokenizer = Peer(name), load(name).tokenizer
    saved = {}
    for i, ids in enumerate(prompts(tokenizer)):
        logits, cache, _ = peer.prefill([ids])
        first = logits.argmax(-1)
        rest, _ = peer.decode(cache, first, 63)
        saved |= {f"prompt_{i}": np.array(ids, np.int32), f"logits_{i}": logits[0, ::every]}
        saved |= {f"tokens_{i}": np.concatenate([first, rest[0]]).astype(np.int32)}
        print(len(ids), repr(tokenizer.decode(saved[f"tokens_{i}"])))
    np.savez_compressed(HERE / f"{which}_golden.npz", **saved)


if __name__ == "__main__":
    main(sys.argv[1])
