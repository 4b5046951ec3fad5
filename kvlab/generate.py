"""Text from a prompt, printed as it comes."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvlab import memory, parts
from kvlab.decode import Engine, needs, per_layer
from kvlab.errors import ConfigError
from kvlab.models import Model, chat
from kvlab.policy import Policy
from kvlab.sampling import Sampling


def prompt_ids(model: Model, text: str, as_chat: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a plain prompt, or of a conversation's first turn by the model's template. Errors: ModelError."""
    if system and not as_chat:
        raise ConfigError("a system message needs a conversation: write --chat too")
    if not as_chat:
        return model.tokenizer.prompt(text)
    messages = [{"role": "system", "content": system}] if system else []
    whole = chat.renderer(model.chat, model.tokenizer, model.stops)([*messages, {"role": "user", "content": text}])
    return model.tokenizer.encode(whole)


class Words:
    """Turns tokens into text piece by piece; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = 0

    def add(self, ids: Sequence[int]) -> str:
        self._ids += [int(i) for i in ids]
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._new(text)

    def flush(self) -> str:
        """What was held back to the end."""
        return self._new(self._tokenizer.decode(self._ids))

    def _new(self, text: str) -> str:
        new, self._done = text[self._done :], len(text)
        return new


def generate(
    engine: Engine,
    policy: Policy | Sequence[Policy],
    ids: list[int],
    new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    show: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Continues a prompt until the model stops or `new_tokens` are made; `show` gets the text as it comes.

    Returns the text and its figures: tokens, tokens_per_s (without the first step, which may compile),
    time_to_first_token (s), resident_bytes of the caches and their share of the full fp32 cache.
    """
    if new_tokens < 1:
        raise ConfigError(f"new_tokens={new_tokens}; allowed: 1 or more")
    model, begin = engine.model, time.perf_counter()
    prompt = engine.prefill([ids], needs(per_layer(policy, model.config)))
    session = engine.start(prompt, policy, new_tokens, stops=model.stops, sampling=sampling, seed=seed)
    first = time.perf_counter() - begin
    words, pieces = Words(model.tokenizer), []

    def put(piece: str):
        pieces.append(piece)
        show(piece)

    each = lambda tokens: put(words.add([t for t in tokens.ravel() if t >= 0 and t not in model.stops]))
    each(session.tokens)
    session.stream(new_tokens - 1, each)
    put(words.flush())
    steps = session.step_seconds[1:] or session.step_seconds
    used = memory.footprint(session.policies, session.state.caches, parts.policy({}), len(ids) + new_tokens)
    return {
        "text": "".join(pieces),
        "tokens": len(session.answers()[0]),
        "tokens_per_s": sum(n for _, n in steps) / sum(s for s, _ in steps) if steps else 0.0,
        "time_to_first_token": first,
        "resident_bytes": used.resident_bytes,
        "resident_ratio": used.resident_ratio,
    }
