"""Remakes gemma3_golden.npz with transformers on the dequantised weights (needs the extra "peers", and consent).

KVLAB_ACCEPT_TERMS=gemma python -m tests.data.make_gemma3_golden
"""

from pathlib import Path

import numpy as np

from kvlab.bench.peers import Peer
from kvlab.models import load

HERE = Path(__file__).parent
EVERY = 64  # of the 262,144 logits, every 64th is kept


def prompts(tokenizer) -> list[list[int]]:
    """Seven tokens, some Python, and 700 tokens of a licence: more than a local window."""
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    long = tokenizer.prompt((HERE.parent.parent / "LICENSE").read_text())[:700]
    return [tokenizer.prompt("The capital city of France is"), tokenizer.prompt(code), long]


def main():
    peer, tokenizer = Peer("gemma3-270m"), load("gemma3-270m").tokenizer
    saved = {}
    for i, ids in enumerate(prompts(tokenizer)):
        logits, cache, _ = peer.prefill([ids])
        first = logits.argmax(-1)
        rest, _ = peer.decode(cache, first, 63)
        saved |= {f"prompt_{i}": np.array(ids, np.int32), f"logits_{i}": logits[0, ::EVERY]}
        saved |= {f"tokens_{i}": np.concatenate([first, rest[0]]).astype(np.int32)}
        print(len(ids), repr(tokenizer.decode(saved[f"tokens_{i}"])))
    np.savez_compressed(HERE / "gemma3_golden.npz", **saved)


if __name__ == "__main__":
    main()
