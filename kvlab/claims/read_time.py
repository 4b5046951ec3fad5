"""How fast this machine reads the same numbers out of two layouts."""

from kvlab.claims.timed import Program, Timed
from kvlab.locality.copies import reader
from kvlab.locality.reads import Reads


class ReadTime(Timed, frozen=True, kw_only=True):
    """By which factor `layout` is read faster than `against`: the reads of a `locality` test, copied in the same order.

    Attributes:
      others: layouts whose times are printed too.
    """

    layout: str
    against: str
    others: list[str] = []
    reads: Reads = Reads()

    def programs(self) -> list[tuple[Program, Program]]:
        return [(self._program(self.against), self._program(self.layout))]

    def beside(self) -> list[Program]:
        return [self._program(name) for name in self.others]

    def said(self) -> str:
        return f"{self.reads.words}: {self.layout} against {self.against} "

    def _program(self, layout: str) -> Program:
        parts = 2 * self.reads.heads * self.reads.count // self.reads.block
        return Program(layout, reader(self.reads.addresses(layout), self.reads.element, parts), self.reads.useful)
