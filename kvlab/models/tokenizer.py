"""Text to token ids and back, through the `tokenizers` library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.errors import ModelError

NORMAL, CONTROL, USER = 1, 3, 4  # GGUF's token types
SPACE = "▁"

# How text is cut before byte-pair merging, as each family's own tokenizer.json has it.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"qwen2": _WORDS % r"\p{N}", "llama-bpe": _WORDS % r"\p{N}{1,3}", "smollm": None}


def from_gguf(fields: dict):
    """The library's tokenizer from a GGUF file's metadata, and the tokenizer_config.json to go with it.

    Errors: ModelError for a kind that is neither byte-level BPE (by `tokenizer.ggml.pre`) nor SentencePiece BPE.
    """
    get: Callable[..., Any] = lambda key, default=None: fields.get(f"tokenizer.ggml.{key}", default)
    model, pre, tokens = get("model"), get("pre"), get("tokens")
    pieces = model in ("llama", "gemma")
    if not pieces and (model != "gpt2" or pre not in PATTERNS):
        allowed = "'llama', 'gemma', or 'gpt2' with " + ", ".join(map(repr, sorted(PATTERNS)))
        raise ModelError(f"tokenizer {model!r} / {pre!r} is unknown; allowed: {allowed}")
    made = _pieces(get, model == "llama") if pieces else _byte_level(get, pre)
    add = get("add_bos_token", pieces or pre == "llama-bpe")
    bos = get("bos_token_id")
    return made, {"add_bos_token": add, "bos_token": None if bos is None else tokens[bos]}


def _byte_level(get, pre: str):
    """GPT-2's byte-level BPE with the cutting that `pre` names."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokens = get("tokens")
    merges = [tuple(line.split(" ")) for line in get("merges", ())]
    made = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe"))
    pattern = PATTERNS[pre]
    if pattern is None:
        cut = pre_tokenizers.Digits(individual_digits=True)
    else:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    kinds = get("token_type")
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds) if kind == CONTROL])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in zip(tokens, kinds) if kind == USER])
    return made


def _pieces(get, prefix: bool):
    """SentencePiece BPE (https://arxiv.org/abs/1808.06226): merges by the score of what they make, bytes for the rest."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    kinds = get("token_type")
    tokens = [t.replace(" ", SPACE) if kind == USER else t for t, kind in zip(get("tokens"), kinds)]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(tokens, get("scores"), kinds, vocab)
    unknown = tokens[get("unknown_token_id", 0)]
    made = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend(SPACE)] if get("add_space_prefix", prefix) else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if steps else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds) if kind == CONTROL])
    made.add_tokens([AddedToken(t, special=False, normalized=True) for t, kind in zip(tokens, kinds) if kind == USER])
    return made


def _merges(tokens, scores, kinds, vocab) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, best score first; user-defined pieces never merge."""
    usable = {t for t, kind in zip(tokens, kinds) if kind == NORMAL}
    order = sorted((i for i, kind in enumerate(kinds) if kind == NORMAL), key=lambda i: (-scores[i], i))
    halves = lambda t: ((t[:k], t[k:]) for k in range(1, len(t)))
    return [pair for i in order for pair in halves(tokens[i]) if pair[0] in usable and pair[1] in usable]


class Tokenizer:
    """`encode` text to ids, `decode` ids to text, `strings` to see tokens one by one.

    Attributes:
      bos: the id that stands before every prompt, None where the model wants none. `encode` leaves it out, so that
        prompts can be put together from pieces; `prompt` and `begin` bring it.
      render: from messages to the model's own text of a conversation (see `kvlab.models.chat`), None if it has no template.
    """

    render: Callable[..., str] | None = None

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is no readable tokenizer ({error}); run: kvlab fetch NAME --again") from error
        self.bos = self._bos(path.with_name("tokenizer_config.json"))

    def _bos(self, about: Path) -> int | None:
        """As tokenizer_config.json says; where it says nothing, whether the library itself puts a token first."""
        try:
            table = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
        except ValueError as error:
            raise ModelError(f"{about} is damaged ({error}); fetch the folder again") from error
        wanted, token = table.get("add_bos_token"), table.get("bos_token")
        if wanted is None:
            some = self._library.decode([self._library.get_vocab_size() // 2])  # a text that any vocabulary has
            plain, full = (self._library.encode(some, add_special_tokens=special).ids for special in (False, True))
            return full[0] if full[:1] != plain[:1] else None
        if not wanted:
            return None
        text = token["content"] if isinstance(token, dict) else token
        found = None if text is None else self._library.token_to_id(text)
        if found is None:
            raise ModelError(f"{about} asks for a BOS token, but {text!r} is none of the tokenizer's tokens")
        return found

    @property
    def begin(self) -> list[int]:
        """What stands before the first token of a prompt: BOS, or nothing."""
        return [] if self.bos is None else [self.bos]

    def prompt(self, text: str) -> list[int]:
        """A whole prompt: `begin` and the text."""
        return self.begin + self.encode(text)

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def strings(self, ids) -> list[str]:
        """Each token as the text it stands for alone."""
        return [self._library.decode([int(i)], skip_special_tokens=False) for i in ids]
