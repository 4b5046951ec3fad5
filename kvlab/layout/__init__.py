"""Where codes lie: one layout a file."""

from kvlab.layout.contiguous import Contiguous
from kvlab.layout.page_major import PageMajor

LAYOUTS = {"contiguous": Contiguous, "page_major": PageMajor}
