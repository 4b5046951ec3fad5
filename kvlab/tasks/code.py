"""Where code leans on something far back: references to names that were last mentioned long before."""

import ast
import dataclasses
import functools
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvlab.errors import ConfigError
from kvlab.tasks import text as source
from kvlab.tasks.asked import Asked, ask, find, steps
from kvlab.tasks.base import Batch, check, generator

SHORTEST = 6  # characters of a name
TAIL = 32  # tokens before the cursor that stand for a question
NEAR = 0.1  # of `depth`, shares of the context
FAR = 0.5  # without a depth, names stand in this first share of it
NEW = {"def", "class", "import", "as", "from", "global", "nonlocal"}  # a name after these is no reference


class Reference(NamedTuple):
    """Characters at which a reference begins and ends, and at which the name was mentioned before it, in order."""

    start: int
    end: int
    before: tuple[int, ...]


class Cursor(NamedTuple):
    """A place to go on from: the context, the tokens that lead up to it, what comes, where its name last stands and how often."""

    document: str
    context: list[int]
    question: list[int]
    answer: str
    span: tuple[int, int]
    mentions: int

    @property
    def depth(self) -> float:
        return self.span[0] / len(self.context)


@functools.lru_cache(maxsize=64)
def references(code: str) -> tuple[Reference, ...]:
    """References inside a line to names that the file itself defines and has mentioned before; none if it is no Python."""
    try:
        own = set(_defined(ast.parse(code)))
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return ()
    lines = [0]
    for line in io.StringIO(code):
        lines.append(lines[-1] + len(line))
    mentions: dict[str, list[int]] = {}
    for m in re.finditer(r"[^\W\d]\w*", code):
        mentions.setdefault(m[0], []).append(m.start())
    found = []
    for last, token in zip(tokens, tokens[1:]):
        if (
            token.type == tokenize.NAME
            and token.string in own
            and last.string not in NEW
            and token.line[: token.start[1]].strip()
        ):
            start = lines[token.start[0] - 1] + token.start[1]
            before = tuple(m for m in mentions[token.string] if m < start)
            if before:
                found.append(Reference(start, start + len(token.string), before))
    return tuple(found)


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that are long enough and that functions, classes, arguments and assignments make."""
    for node in ast.walk(tree):
        name: Any = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name and len(name) >= SHORTEST and not keyword.iskeyword(name):
            yield name


def cursor(task: Asked, tokenizer, rng, depth: float | None, mentions: int, line: bool) -> Cursor:
    """The first place that fits, of documents and references in an order that `rng` draws: a name that the context mentions at
    most `mentions` times, last near `depth`. The answer is the name, or its whole line. Errors: ConfigError where none fits.
    """
    text = task.text  # type: ignore[attr-defined]
    texts = source.documents(text)
    low, high = (0, FAR) if depth is None else (depth - NEAR, depth + NEAR)
    for i in rng.permutation(len(texts)):
        name, code = texts[i]
        if len(code) <= task.length:
            continue
        width = len(code) / len(tokenizer.encode(code)) * task.length  # characters of a context, about
        usable = [r for r in references(code) if r.start > width and low <= 1 - (r.start - r.before[-1]) / width <= high]
        for j in rng.permutation(len(usable))[:4]:
            found = _at(task, tokenizer, name, code, usable[j], line)
            if found and low <= found.depth <= high and found.mentions <= mentions:
                return found
    raise ConfigError(
        f"text={text!r} has no place that fits length={task.length}, mentions={mentions}, depth={depth}; "
        'allow more mentions or another depth, or write text = "stdlib"'
    )


def _at(task: Asked, tokenizer, document: str, code: str, at: Reference, line: bool) -> Cursor | None:
    """The cursor before a reference or its line; None where the file is too short or the context does not hold the name."""
    cut = code.rfind("\n", 0, at.start) + 1 if line else len(code[: at.start].rstrip(" "))
    answer = (code[cut:] + "\n").splitlines()[0].strip() if line else code[at.start : at.end]
    begin, ids = list(tokenizer.begin), tokenizer.encode(code[:cut])
    size = task.length - len(begin) + (0 if task.known else TAIL)
    if len(ids) < size or len(answer) < SHORTEST:
        return None
    ids = ids[len(ids) - size :]
    context, question, name = begin + ids[:-TAIL], ids[-TAIL:], code[at.start : at.end]
    often = tokenizer.decode(context).count(name)  # as a part of other names too
    if not often or name in tokenizer.decode(question):
        return None
    return Cursor(document, context, question, answer, find(tokenizer, context, name), often)


@dataclasses.dataclass(frozen=True)
class Code(Asked):
    """Base of tasks that go on with a program at such a place; their docstrings say what the fields mean."""

    length: int = 2048
    contexts: int = 8
    depth: float | None = None
    mentions: int = 3
    known: bool = False
    new_tokens: int | None = None
    text: str = "stdlib"

    name = ""
    line = False  # whether the answer is the whole line, which stands nowhere before, or the name

    def __post_init__(self):
        check(self.name, contexts=(self.contexts, 1, None), length=(self.length, 4 * TAIL, None))
        check(self.name, depth=(self.depth, 0, 0.9), mentions=(self.mentions, 1, None), new_tokens=(self.new_tokens, 1, None))

    def room(self, tokenizer, answer: str) -> int:
        """Tokens that an answer may take where `new_tokens` does not say."""
        raise NotImplementedError

    def batch(self, index: int, seed: int, tokenizer) -> Batch:
        found = cursor(self, tokenizer, generator(seed, index), self.depth, self.mentions, self.line)
        facts = [{"context": index, "document": found.document, "depth": round(found.depth, 4)}]
        prompts, rows, forced = ask(found.context, [found.question], self.known)
        answer = self.new_tokens or self.room(tokenizer, found.answer)
        spans = [] if self.line else [found.span]
        return Batch(prompts, rows, forced, steps(forced, answer), facts, [found.answer], spans)
