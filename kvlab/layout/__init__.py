"""Where codes lie: one layout a file."""

from kvlab.layout.contiguous import Contiguous

LAYOUTS = {"contiguous": Contiguous}
