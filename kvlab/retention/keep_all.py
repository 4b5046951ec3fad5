"""Everything stays."""

from kvlab.core import Retention, part


@part
class KeepAll(Retention):
    """The full cache: nothing is ever evicted, and a sequence that outgrows it is an error."""

    evicts = False

    def priority(self, state, pos, now):
        return pos
