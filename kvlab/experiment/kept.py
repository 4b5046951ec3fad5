"""What several visits of a batch share, as long as it fits."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax


class Kept:
    """Things made once for a key, up to `most` bytes of arrays in all; what no longer fits is made anew each time."""

    def __init__(self, most: int = 0):
        self.left = most
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes for this key."""
        if key in self._made:
            return self._made[key]
        made = make()
        if (size := _bytes(made)) <= self.left:
            self.left -= size
            self._made[key] = made
        return made


def _bytes(thing: Any) -> int:
    """Bytes of the arrays in a pytree, or in the fields of a dataclass."""
    leaves = jax.tree.leaves(vars(thing) if dataclasses.is_dataclass(thing) else thing)
    return sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
