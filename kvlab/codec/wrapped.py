"""A codec around another one."""

import dataclasses
from typing import Any

from kvlab.core import Codec, part


@part
class Wrapped(Codec):
    """Does something to vectors before `inner` encodes them; everything that is not overridden is inner's.

    An inner codec that differs for keys and values is wrapped on both sides.
    """

    inner: Any

    @property
    def group(self) -> int:
        return self.inner.group

    @property
    def residual(self) -> int:
        return self.inner.residual

    @property
    def keys(self) -> Codec:
        return self._around(self.inner.keys)

    @property
    def values(self) -> Codec:
        return self._around(self.inner.values)

    def at(self, layer: int, model) -> Codec:
        return self._around(self.inner.at(layer, model))

    def _around(self, inner: Codec) -> Codec:
        return self if inner is self.inner else dataclasses.replace(self, inner=inner)

    def encode(self, x_BHNPD, pos_BHNP=None):
        return self.inner.encode(x_BHNPD, pos_BHNP)

    def plain(self, code, pos_BHNP=None):
        """What `inner` was given, as far as it kept it."""
        return self.inner.output(self.inner.decode(code, pos_BHNP))

    def page_bytes(self, dim: int) -> int:
        return self.inner.page_bytes(dim)
