"""Errors that a user can act on. The command line prints them as one line and exits with 2."""


class KvlabError(Exception):
    """Something that was asked for cannot be done; the message says what to write instead."""


class ConfigError(KvlabError):
    """A config file, an override or a part's option is wrong."""


class RefusedPolicy(KvlabError):
    """Four parts that cannot work together; the message names the ways out."""


class CapacityError(KvlabError):
    """A prompt or a continuation does not fit the cache or the model's context."""


class ModelError(KvlabError):
    """Weights or a tokenizer are missing, truncated, corrupt or of an unknown kind."""


class ResultsError(KvlabError):
    """A results folder cannot be written, read or resumed."""


class FailedCells(KvlabError):
    """Cells of an experiment failed while the others went on.

    Attributes:
      code: what the command line exits with: 2 if every error was a `KvlabError`, else 1.
      frame: the table of the cells that are done; None where there are none.
    """

    def __init__(self, message: str, code: int = 2, frame=None):
        super().__init__(message)
        self.code, self.frame = code, frame


def nearest(given: str, allowed) -> str:
    """`"did you mean 'x'? "` for the closest allowed word (or nothing), then the whole list."""
    import difflib

    allowed = sorted(allowed)
    close = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(allowed)}"
