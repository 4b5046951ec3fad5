"""Conversations as text, by the template that comes with a model."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab.errors import ModelError


def template(folder: Path) -> str | None:
    """A model folder's chat template (chat_template.jinja, or in one of its JSON files); None if it has none."""
    from kvlab.models.checkpoint import read_json

    if (file := folder / "chat_template.jinja").exists():
        return file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "config.json"):
        if (folder / name).exists() and isinstance(found := read_json(folder / name).get("chat_template"), str):
            return found
    return None


def render(source: str | None, messages: Sequence[dict[str, str]], bos: str = "", eos: str = "") -> str:
    """The text of a conversation, ready for the assistant's answer.

    Args:
      source: a Jinja template; it comes with the weights, so it runs in jinja2's sandbox.
      messages: [{"role": "user", "content": "…"}, …].
    Errors: ModelError for a model without a template, or a template that does not take these messages.
    """
    if source is None:
        raise ModelError("this model has no chat template (it was not trained on conversations); give plain text instead")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message):
        raise ModelError(f"the model's chat template refuses these messages: {message}")

    environment.globals["raise_exception"] = refuse
    try:
        made = environment.from_string(source)
        return made.render(messages=messages, add_generation_prompt=True, bos_token=bos, eos_token=eos)
    except TemplateError as error:
        raise ModelError(f"the model's chat template fails ({error}); give plain text instead") from error


def renderer(source: str | None, tokenizer, stops: Sequence[int]) -> Callable[[Sequence[dict[str, str]]], str]:
    """`render` with a model's own template, and its BOS and first stop token as text."""
    special = lambda ids: tokenizer.strings(ids)[0] if ids else ""
    return functools.partial(render, source, bos=special(tokenizer.begin), eos=special(stops[:1]))
