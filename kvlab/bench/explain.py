"""Why answers or likelihoods differ from those of kvpress's pipeline: reasons that are computed (extra "peers")."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvlab.bench import parity, rows
from kvlab.bench.pipeline import HIDE, Pipeline
from kvlab.bench.rows import ROUNDING, Found
from kvlab.bench.side import Ours
from kvlab.tasks import Batch

Why = Callable[[Found, bool], str]


@contextlib.contextmanager
def reasons(ours: Ours, theirs: Pipeline, methods: list[str]) -> Iterator[Why]:
    """Lends a function from a method and whether it agrees to the reason; "" where nothing differs, or nothing explains it."""
    name, asked = ours.engine.model.name, [method for method in methods if method in parity.METHODS]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "filters.safetensors"
        case = functools.lru_cache(maxsize=1)(lambda ids: parity.prepare(name, name, lambda _: list(ids), asked, file))

        def why(found: Found, agree: bool) -> str:
            at = found.differs() or 0
            if agree and found.differs() is None:
                return ""
            if found.method in parity.METHODS:
                kept = parity.compare(found.method, found.ratio, case(tuple(found.prompt[at])))
                return ("the same tokens stay" if agree else "") if kept["agree"] else kept["reason"]
            return shows_through(ours, theirs, found, at) if found.method in HIDE else ""

        yield why


def shows_through(ours: Ours, theirs: Pipeline, found: Found, at: int) -> str:
    """The reason where a turn's likelihood is kvlab's once kvpress is fed token by token, and is not in one piece.

    kvpress hides a token behind a false key, one for all queries of a piece: what is near to some of them shows through.
    """
    ids, turn = found.prompt[at], found.turn[at]
    batch = Batch([ids], [0], [turn], len(turn), [{}], [""])
    mine = ours.logits(ours.prefill(batch, [found.method]), found.method, found.ratio, batch, [turn])[0]
    cache = theirs.compressed(theirs.passed(ids), found.method, found.ratio)
    apart = lambda step: np.abs(difference(mine, theirs.fed(cache, turn, len(ids), step), turn)).mean()
    piece, single = apart(None), apart(1)
    if not single <= ROUNDING < piece:
        return ""
    return (
        f"tokens that kvpress hides show through where several are fed at once: a question's NLL is off by {piece:.0e} nats "
        f"a token, token by token by {single:.0e}"
    )


def difference(mine_TV, theirs_TV, turn) -> np.ndarray:
    """Nats of each token of a turn but the first, kvlab's less kvpress's."""
    return rows.nll(mine_TV[:-1], turn[1:]) - rows.nll(theirs_TV[:-1], turn[1:])
