"""Which tokens of a prompt a cache held once it was filled, as a mask and as text; of a row of `kvlab.results.load(folder)`."""

import numpy as np

BLOCKS, GREENS = " ░▒▓█", (231, 194, 157, 120, 83)  # from nobody to everybody; colours by their numbers in a terminal


def held(sample) -> np.ndarray:
    """Bool `[L, H, T]`, of a row of "samples"."""
    every = np.arange(len(sample["prompt_tokens"]))
    return np.array([[np.isin(every, head) for head in layer] for layer in sample["kept_positions"]])


def coloured(sample, start: int = 0, stop: int | None = None, width: int = 14) -> str:
    """The prompt's tokens from `start` to `stop`, `width` a line: the fuller the block after one, and the greener it is, the more
    (layer, KV head) hold it. For a terminal or a notebook."""
    words = [word.replace("\n", "⏎").strip() for word in sample["prompt_tokens"][start:stop]]
    levels = (held(sample).mean((0, 1))[start:stop] * (len(BLOCKS) - 1)).round().astype(int)
    size = max(map(len, words), default=0)
    cells = [f"\x1b[30;48;5;{GREENS[level]}m{word:>{size}}{BLOCKS[level]}\x1b[0m" for word, level in zip(words, levels)]
    return "\n".join("".join(cells[i : i + width]) for i in range(0, len(cells), width))
