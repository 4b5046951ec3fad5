"""Where codes lie: one layout a file."""

from kvlab.layout.bicl import Bicl
from kvlab.layout.contiguous import Contiguous
from kvlab.layout.page_major import PageMajor
from kvlab.layout.paged import Paged

LAYOUTS = {"contiguous": Contiguous, "page_major": PageMajor, "paged": Paged, "bicl": Bicl}
