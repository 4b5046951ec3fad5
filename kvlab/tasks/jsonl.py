"""Questions of one's own, from a file."""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from kvlab.errors import ConfigError
from kvlab.tasks.asked import Asked, ask, holds, room, steps
from kvlab.tasks.base import Batch, check, generator


class Line(msgspec.Struct, frozen=True):
    """One line of the file; other keys are left alone."""

    context: str
    question: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Jsonl(Asked):
    """Lines of a file, {"context": "…", "question": "…", "answers": ["…", …]}; those with the same context make one batch.

        context    the line's context
        question   the line's question                (fed token by token once the cache is filled)
        target     any of its answers, anywhere in what the model writes, whole, in capitals or not

    A question is put behind the context as it stands, so it brings its own line break and the words that make a model answer.
    Where an answer stands in a context is not known, so there are no spans, and no depth.

    Fields:
      path: the file; its content goes into env.json, so results of another are refused.
      length: the most tokens of a context (with its question, where that is known).
      contexts: different contexts to take, in an order that the seed draws; None for all.
      too_long: "clip" leaves out the middle of a longer context, "refuse" refuses it.
      known: the question is part of the prompt.
      new_tokens: tokens that an answer may take.
    """

    path: str
    length: int = 2048
    contexts: int | None = None
    too_long: Literal["clip", "refuse"] = "clip"
    known: bool = False
    new_tokens: int = 32

    def __post_init__(self):
        check("jsonl", length=(self.length, 2, None), new_tokens=(self.new_tokens, 1, None))
        check("jsonl", contexts=(self.contexts, 1, len(read(self.path))))

    def digest(self) -> str:
        return hashlib.sha256(Path(self.path).expanduser().read_bytes()).hexdigest()

    def count(self) -> int:
        return self.contexts or len(read(self.path))

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        contexts = read(self.path)
        which = int(generator(seed, 0).permutation(len(contexts))[index])
        lines = list(contexts[which].items())
        questions = [tokenizer.encode(line.question) for _, line in lines]
        left = room(self, tokenizer, questions)
        ids = tokenizer.encode(lines[0][1].context)
        if len(ids) > left and self.too_long == "refuse":
            raise ConfigError(
                f"{self.path}, line {lines[0][0]}: the context has {len(ids)} tokens, {left} fit; raise length={self.length}, "
                'shorten it, or write too_long = "clip"'
            )
        if len(ids) > left:
            ids = ids[: left - left // 2] + ids[len(ids) - left // 2 :]
        facts = [{"context": which, "line": number} for number, _ in lines]
        prompts, rows, forced = ask([*tokenizer.begin, *ids], questions, self.known)
        return Batch(prompts, rows, forced, steps(forced, self.new_tokens), facts, [line.answers for _, line in lines])

    def mark(self, answer, target):
        return {"correct": any(holds(answer.casefold(), possible.casefold()) for possible in target)}

    def written(self, target):
        return target[0]


def read(path: str) -> tuple[dict[int, Line], ...]:
    """For each context of a file, in the order in which they first come, its lines by number. Errors: ConfigError."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"jsonl: path={path!r} cannot be read ({error}); give a text file with one JSON object a line"
        ) from error
    return _contexts(path, text)


@functools.lru_cache(maxsize=8)
def _contexts(path: str, text: str) -> tuple[dict[int, Line], ...]:
    contexts: dict[str, dict[int, Line]] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        if raw.strip():
            line = _line(path, number, raw)
            contexts.setdefault(line.context, {})[number] = line
    if not contexts:
        raise ConfigError(f"jsonl: {path} is empty; give one JSON object a line, with context, question and answers")
    return tuple(contexts.values())


def _line(path: str, number: int, raw: str) -> Line:
    where, form = f"{path}, line {number}", 'write {"context": "…", "question": "…", "answers": ["…"]}'
    try:
        line = msgspec.json.decode(raw, type=Line)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {error}; {form}") from error
    for key in ("context", "question", "answers"):
        if not getattr(line, key) or (key == "answers" and not all(answer.strip() for answer in line.answers)):
            raise ConfigError(f"{where}: {key} has nothing in it; {form}")
    return line
