"""What is measured where: on a GPU at sizes where memory is the limit, on the CPU tiny and step by step."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax

from kvlab.core import PAGE
from kvlab.errors import ConfigError

MIB, GIB = 2**20, 2**30
SHARE = 16  # a selection reads one page of so many
READS = ("dense", "pages")
DTYPES = ("bfloat16", "int8")
EXACT = ("float32", *DTYPES)  # those that are checked
DEVICES = ("gpu", "cpu")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of a run.

    Attributes:
      implementation: of the kernels, as policies call it.
      heads, groups, dim: KV heads, query heads of each, head dimension.
      lengths, batches: what is timed.
      cold: bytes that are read before the same byte is read again, so that no cache of the device serves them.
      traffic: bytes that one timed call reads at least, so that starting it does not count.
      rounds: interleaved repetitions; 0 times nothing.
      workers: programs that are compiled side by side.
    """

    implementation: str
    heads: int
    groups: int
    dim: int
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    cold: int = 0
    traffic: int = 0
    rounds: int = 0
    workers: int = 1

    @property
    def interpret(self) -> bool:
        return self.implementation == "interpret"

    def tolerance(self, dtype: str, peer: bool = False) -> float:
        """Largest error that counts as right, over the largest number of the exact output.

        Numbers of 16 and 8 bits are exact as stored, so what is left is products. A peer may take them in 16 bits. kvlab's are
        exact; only sums are rounded, in float32, which a GPU's units for 16-bit products may do less carefully than others.
        """
        if peer and dtype != "float32":
            return 2e-2
        return 1e-5 if dtype == "float32" or self.interpret else 1e-4

    def pages(self, length: int) -> int:
        """Pages that a selection reads."""
        return max(1, length // PAGE // SHARE)


class Sizes(NamedTuple):
    """A length and batch, the kinds of numbers in it, and how many tokens each row holds if not all."""

    setting: Setting
    length: int
    batch: int
    dtypes: tuple[str, ...]
    held: tuple[int, ...] = ()


def order(setting: Setting, dtypes: tuple[str, ...]) -> Iterator[Sizes]:
    """What is run after what: every case small and ragged, to see whether it is right, then whatever is timed."""
    yield Sizes(dataclasses.replace(setting, cold=0, traffic=0, rounds=0), 3 * PAGE, 2, dtypes, (150, PAGE))
    if setting.rounds:
        for length in setting.lengths:
            for batch in setting.batches:
                yield Sizes(setting, length, batch, tuple(x for x in dtypes if x in DTYPES))


SETTINGS = {
    "gpu": Setting("triton", 8, 4, 128, (8192, 32_768, 131_072), (1, 8), 256 * MIB, 4 * GIB, rounds=9, workers=8),
    "cpu": Setting("interpret", 2, 4, 64),
}


def device(name: str) -> jax.Device:
    """The device to run on. Errors: ConfigError for another name, and where jax finds none."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name}; allowed: {', '.join(DEVICES)}")
    try:
        return jax.devices("cuda" if name == "gpu" else name)[0]
    except RuntimeError:
        raise ConfigError(
            f"--device {name}: jax finds no NVIDIA GPU, only {jax.default_backend()}; install kvlab's extra 'cuda' on a machine "
            "that has one, or use --device cpu (right or wrong, no speeds) or --lower (do the kernels lower for one)"
        ) from None
