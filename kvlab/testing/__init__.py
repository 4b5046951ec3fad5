"""The contract of parts, as a kit: `check(part)` puts anybody's retention, codec, layout or selection through it."""

from kvlab.testing.contract import Breach, Report, check

__all__ = ["Breach", "Report", "check"]
