"""Set-associative caches with least-recently-used replacement, from stack distances instead of access by access."""

from typing import NamedTuple

import numpy as np

from kvlab.errors import ConfigError


class Cache(NamedTuple):
    """A cache of `size` bytes in lines of `line` bytes, `ways` of them in a set."""

    size: int
    ways: int
    line: int

    @property
    def sets(self) -> int:
        """Errors: ConfigError where the sizes do not divide."""
        sets, rest = divmod(self.size, self.ways * self.line)
        if sets < 1 or rest:
            raise ConfigError(
                f"a cache of {self.size} bytes cannot have {self.ways} ways of {self.line}-byte lines; write 32768, 8, 64"
            )
        return sets


class Machine(NamedTuple):
    """Two caches and a TLB (`size` = entries · page); by default those of a Zen 3 core."""

    first: Cache = Cache(32 << 10, 8, 64)
    second: Cache = Cache(512 << 10, 8, 64)
    pages: Cache = Cache(64 << 12, 64, 1 << 12)


class Figures(NamedTuple):
    """What a trace of byte addresses did.

    Attributes:
      first, second, pages: misses of both caches and of the TLB; the second cache sees what the first one misses.
      lines: distinct lines.
      moved, beyond: bytes that enter the first cache, and the second one, for each useful byte.
      loads: bytes of a load → accesses.
    """

    first: int
    second: int
    pages: int
    lines: int
    moved: float
    beyond: float
    loads: dict[int, int]

    def rate(self, load: int) -> float:
        """Misses of the first cache by access, with loads of so many bytes."""
        return self.first / self.loads[load]


def simulate(address, useful: int, loads, machine: Machine) -> Figures:
    """Runs byte addresses `[n]`, in the order in which they are read, through cold caches; `useful` bytes of them were asked for.

    Neighbours in the same aligned `load` bytes are one access, so misses do not depend on loads, and their rate does.
    """
    line = step(address, machine.first.line)
    first = line[missed(line, machine.first)]
    second = int(missed(first * machine.first.line // machine.second.line, machine.second).sum())
    pages = int(missed(step(address, machine.pages.line), machine.pages).sum())
    moved, beyond = len(first) * machine.first.line / useful, second * machine.second.line / useful
    accesses = {load: len(step(address, load)) for load in loads}
    return Figures(len(first), second, pages, len(np.unique(line)), moved, beyond, accesses)


def step(address, size: int):
    """The blocks of `size` bytes that addresses run through, without repeating the one before."""
    block = address // size
    return block[np.append(True, block[1:] != block[:-1])] if len(block) else block


def missed(block, cache: Cache):
    """Which accesses to blocks `[n]` miss, as booleans.

    An access hits where fewer than `ways` other blocks of its set were seen since its block was last (Mattson, Gecsei, Slutz &
    Traiger, 1970, https://doi.org/10.1147/sj.92.0078). With the accesses of each set in a row, at i and with the block last at
    p(i), these are i − p(i) − 1 less the repeats among them, and those are the earlier j with p(j) > p(i).
    """
    block = np.asarray(block)
    order = np.argsort(block % cache.sets, kind="stable")
    own = block[order]
    last = _last(own)
    again = np.flatnonzero(last >= 0)
    named = np.zeros(len(own), np.int32)
    named[last[again]] = 1
    repeats = larger_before((np.cumsum(named, dtype=np.int32) - 1)[last[again]])
    miss = np.ones(len(own), bool)
    miss[again] = again - last[again] - 1 - repeats >= cache.ways
    result = np.empty_like(miss)
    result[order] = miss
    return result


def _last(block):
    """Where each block was accessed before, −1 where it was not."""
    order = np.argsort(block, kind="stable")
    same = block[order[1:]] == block[order[:-1]]
    last = np.full(len(block), -1)
    last[order[1:][same]] = order[:-1][same]
    return last


def larger_before(rank):
    """How many earlier entries of a permutation of 0 … n−1 are larger, for each; bit by bit from the highest.

    Items lie sorted by their higher bits, otherwise as they came. An item whose next bit is 0 is passed by the ones before it
    in its group, which begins at the group's lowest rank because no rank is missing.
    """
    rank = np.array(rank, np.int32)
    at, item, count = np.arange(len(rank), dtype=np.int32), np.arange(len(rank)), np.zeros(len(rank), np.int32)
    for bit in reversed(range(len(rank).bit_length())):
        one = rank >> bit & 1
        start = rank >> bit + 1 << bit + 1
        ones = np.cumsum(one, dtype=np.int32) - one
        before = ones - ones[start]
        zero = one == 0
        count[item[zero]] += before[zero]
        place = (rank >> bit << bit) + np.where(zero, at - start - before, before)
        rank[place], item[place] = rank.copy(), item.copy()
    return count
