"""Text to token ids and back, through the `tokenizers` library."""

from pathlib import Path

from kvlab.errors import ModelError

CONTROL = 3  # GGUF's token type for tokens with a meaning of their own


def from_gguf(fields: dict):
    """A byte-level BPE tokenizer (GPT-2 style, digits one by one) from a GGUF file's metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pre = fields.get("tokenizer.ggml.pre")
    if fields["tokenizer.ggml.model"] != "gpt2" or pre != "smollm":
        raise ModelError(f"tokenizer {fields['tokenizer.ggml.model']!r} / {pre!r} is unknown; allowed: 'gpt2' / 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds) if kind == CONTROL]
    made.add_special_tokens(special)
    return made


class Tokenizer:
    """`encode` text to ids, `decode` ids to text, `strings` to see tokens one by one."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is no readable tokenizer ({error}); run: kvlab fetch NAME --again") from error

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def strings(self, ids) -> list[str]:
        """Each token as the text it stands for alone."""
        return [self._library.decode([int(i)], skip_special_tokens=False) for i in ids]
