"""Everything stored is read."""

from kvlab.core import Selection, part


@part
class ReadAll(Selection):
    """Every query reads every visible token."""

    reads_all = True
