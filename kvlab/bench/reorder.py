"""What it costs to put keys and values where a layout wants them, beside the prefill that makes them.

They are placed while a cache is filled, so no pass over the cache follows; what that pass would take is measured too, from a
filled contiguous cache. An article on a block-interleaved layout states that placing keys as they are committed brought
reordering from 12 % of prefill down to 1.3 %.
"""

import functools
import time
from typing import Any

import jax
import numpy as np

from kvlab import parts
from kvlab.decode import Engine
from kvlab.models import load

LAYOUTS = ("contiguous", "page_major", "bicl")
ARTICLE = {"second_pass": 0.12, "placed": 0.013}


def main(model: str, lengths: list[int], codec: str, pairs: int) -> dict:
    """By prompt length and layout: seconds, and shares of prefill as medians over interleaved repetitions."""
    engine = Engine(load(model))
    figures: dict[str, Any] = {"article_share_second_pass": ARTICLE["second_pass"], "article_share_placed": ARTICLE["placed"]}
    for length in lengths:
        figures[str(length)] = _measured(engine, length, codec, pairs)
    return figures


def _measured(engine: Engine, length: int, codec: str, pairs: int) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, (1, length)).tolist()
    policies = {name: parts.policy({"layout": name, "codec": codec}) for name in LAYOUTS}
    rows: list[dict[str, float]] = []
    for i in range(pairs + 1):  # the first one compiles
        row = {"prefill": (prompt := engine.prefill(ids)).seconds}
        for name in np.roll(LAYOUTS, i).tolist():
            session = engine.start(prompt, policies[name], 64)
            row[name] = session.fill_seconds
            if name == "contiguous":
                for other in LAYOUTS[1:]:
                    row[f"{other} afterwards"] = _second_pass(session, policies[other].at(0, engine.config))
            del session
        rows.append(row)
    return _figures({name: np.array([row[name] for row in rows[1:]]) for name in rows[0]}, length)


def _second_pass(session, policy) -> float:
    """Seconds in which a filled contiguous cache is laid out anew, layer by layer."""
    first = session.policies[0].layout, policy.layout
    jax.block_until_ready(_laid_out(*first, session.state.caches[0]))  # compiles
    begin = time.perf_counter()
    for cache in session.state.caches:
        jax.block_until_ready(_laid_out(*first, cache))
    return time.perf_counter() - begin


@functools.partial(jax.jit, static_argnums=(0, 1))
def _laid_out(old, new, cache):
    return new.pack(old.slice(cache.memory, 0, cache.pos.shape[2]), (cache.pos >= 0).any(-1))


def _figures(seconds: dict[str, np.ndarray], length: int) -> dict[str, Any]:
    prefill, middle = seconds["prefill"], lambda x: float(np.median(x))
    figures: dict[str, Any] = {"prefill_s": middle(prefill)}
    print(f"{length} tokens: prefill {figures['prefill_s']:.2f} s, median of {len(prefill)}")
    for name in LAYOUTS:
        fill = seconds[name]
        own = {
            "fill_s": middle(fill),
            "share": middle(fill / (prefill + fill)),  # of prefill and filling together
            "more_than_contiguous": middle((fill - seconds["contiguous"]) / prefill),  # shares of prefill
        }
        words = f"  {name:11} fills in {own['fill_s']:.3f} s, {own['share']:.2%} of the time"
        if name != "contiguous":
            after = seconds[f"{name} afterwards"]
            own |= {"second_pass_s": middle(after), "second_pass_share": middle(after / prefill)}
            words += f"; placing {own['more_than_contiguous']:+.2%} of prefill (article {ARTICLE['placed']:.1%})"
            words += f"; as a second pass {own['second_pass_share']:.2%} (article {ARTICLE['second_pass']:.0%})"
        print(words)
        figures[name] = own
    return figures
