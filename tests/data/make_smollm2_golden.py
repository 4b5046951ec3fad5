"""Remakes smollm2_golden.npz with transformers on the dequantised weights (needs the extra "peers").

python -m tests.data.make_smollm2_golden
"""

import sysconfig
from pathlib import Path

import numpy as np

from kvlab.bench.peers import Peer
from kvlab.models import load

HERE = Path(__file__).parent
EVERY = 8  # of the 49,152 logits, every eighth is kept


def prompts(tokenizer) -> list[list[int]]:
    """Six tokens, a chat turn, and 1,100 tokens of Python."""
    code = Path(sysconfig.get_paths()["stdlib"], "this.py").read_text()
    long = tokenizer.encode(code * 4)[:1100]
    texts = ["The capital city of France is", "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"]
    return [*(tokenizer.encode(t) for t in texts), long]


def main():
    peer, tokenizer = Peer("smollm2-135m"), load("smollm2-135m").tokenizer
    saved = {}
    for i, ids in enumerate(prompts(tokenizer)):
        logits, cache, _ = peer.prefill([ids])
        first = logits.argmax(-1)
        rest, _ = peer.decode(cache, first, 63)
        saved |= {f"prompt_{i}": np.array(ids, np.int32), f"logits_{i}": logits[0, ::EVERY]}
        saved |= {f"tokens_{i}": np.concatenate([first, rest[0]]).astype(np.int32)}
        print(len(ids), repr(tokenizer.decode(saved[f"tokens_{i}"])))
    np.savez_compressed(HERE / "smollm2_golden.npz", **saved)


if __name__ == "__main__":
    main()
