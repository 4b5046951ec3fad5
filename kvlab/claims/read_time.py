"""How fast this machine reads the same numbers out of two layouts."""

from kvlab.claims.timed import Program, TwoLayouts
from kvlab.locality.copies import reader
from kvlab.locality.reads import Reads


class ReadTime(TwoLayouts, frozen=True, kw_only=True):
    """By which factor `layout` is read faster than `against`: the reads of a `locality` test, copied in the same order."""

    reads: Reads = Reads()

    def said(self) -> str:
        return f"{self.reads.words}: {self.layout} against {self.against} "

    def over(self, layout: str) -> Program:
        parts = 2 * self.reads.heads * self.reads.count // self.reads.block
        return Program(layout, reader(self.reads.addresses(layout), self.reads.element, parts), self.reads.useful)
