"""The baseline that kvlab has no layout for: token-major memory, read by kvlab's own kernel through another address map."""

from typing import Any, NamedTuple

from kvlab.bench.token_major import TokenMajor
from kvlab.core import Codec
from kvlab.kernels import codes, decode, places


class View(NamedTuple):
    """A leaf `[B, N, p, H, C]`, indexed as if it were `[B, H, N, p, C]`."""

    leaf: Any

    @property
    def shape(self) -> tuple[int, ...]:
        B, N, p, H, C = self.leaf.shape
        return B, H, N, p, C

    @property
    def dtype(self):
        return self.leaf.dtype

    def __getitem__(self, index):
        row, head, page, tokens, columns = index
        return self.leaf[row, page, tokens, head, columns]


class Place(places.PageMajor):
    """Keys and values `[B, N, p, H, C]`: a head's rows lie H·C numbers apart."""

    canonical = True

    def leaf(self, memory, side: str, name: str):
        return View(memory[side][name])

    def shape(self, leaf, side: str, name: str):
        return leaf.shape[-2:]


def kernel(codec: Codec) -> decode.Kernel:
    """Decode attention over `TokenMajor` memory; keys are turned after they were read."""
    numbers = codes.NUMBERS[str(codes.name(codec))]
    return decode.Kernel(lambda layout, memory, pages, dim: Place(dim), lambda x: numbers(x.T), numbers)


__all__ = ["TokenMajor", "kernel"]
