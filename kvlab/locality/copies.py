"""The reads of a trace on this machine's clock: the same numbers in the same order, copied into a buffer that stays in cache."""

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of a number
BUFFER, LINE = 1 << 18, 64  # bytes


def runs(address, element: int):
    """(first numbers, length): the trace as runs of equally many neighbours, as long as all of them can be."""
    number = np.asarray(address) // element
    begin = np.append(0, np.flatnonzero(np.diff(number) != 1) + 1)
    length = math.gcd(*(int(g) for g in np.unique(np.append(np.diff(begin, append=len(number)), number[begin]))))
    return number.reshape(-1, length)[:, 0], length


def reader(address, element: int, parts: int) -> Callable[[], float]:
    """A function that reads the trace once and returns the seconds that its thread computed, others on the core not counted.

    The trace has equal `parts`, each with its own length of runs: keys of a block, then its values. Every run costs the look-up
    of an index, so numbers that lie alone are read more slowly than a kernel would that computes where they are.
    """
    known = [runs(part, element) for part in np.reshape(address, (parts, -1))]
    longest = max(length for _, length in known)
    memory = _aligned(int(np.max(address)) // element + longest, TYPES[element])
    room, pieces = _aligned(max(BUFFER // element, longest), TYPES[element]), []
    for length, same in itertools.groupby(known, lambda part: part[1]):
        first = np.concatenate([part[0] for part in same]) // length
        table = memory[: len(memory) // length * length].reshape(-1, length)
        step = max(BUFFER // (length * element), 1)
        for begin in range(0, len(first), step):
            some = first[begin : begin + step]
            pieces.append((table, some, room[: len(some) * length].reshape(-1, length)))

    def read() -> float:
        begin = time.thread_time()
        for table, first, buffer in pieces:
            np.take(table, first, 0, buffer, "clip")
        return time.thread_time() - begin

    return read


def _aligned(count: int, dtype):
    """Ones that begin a cache line. On a Zen 3 core long copies to anywhere else are 6 times slower, for no fault of a layout
    (https://lunnova.dev/articles/ryzen-slow-short-rep-mov/)."""
    raw = np.empty(count * np.dtype(dtype).itemsize + LINE, np.uint8)
    begin = -raw.ctypes.data % LINE
    made = raw[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)
    made[:] = 1
    return made


def interleaved(programs: Sequence[Callable[[], float]], repeats: int):
    """Seconds `[repeats, programs]`, one after another in turn, back and forth so that none is always first; one round unseen."""
    taken = np.empty((repeats, len(programs)))
    for program in programs:
        program()
    for i in range(repeats):
        order = range(len(programs)) if i % 2 == 0 else reversed(range(len(programs)))
        for j in order:
            taken[i, j] = programs[j]()
    return taken
