"""Remakes tokenizer_golden.npz: token ids of three texts from libraries that kvlab does not use.

    pip install sentencepiece tiktoken regex
    python -m tests.data.make_tokenizer_golden gemma-3-270m.gguf

Gemma's reference is SentencePiece on a model put together from the file's pieces, scores and types; that of the byte-level
kinds is tiktoken on SmolLM2's merges, after the text was cut by the family's expression.
"""

import json
import random
import sys
from pathlib import Path

import gguf
import numpy as np
import regex
import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2

from kvlab.models import fetch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SENTENCES = """
    缓存策略决定模型记住什么。
    今天天气很好，我们一起去公园散步吧！
    机器学习需要大量的数据和计算资源。
    北京是中华人民共和国的首都
    請問附近有沒有便宜的餐廳？
    數字一二三四五六七八九十。
    他说：“明天见。”
    価格は１２３４円です。
    한국어도조금있습니다.
    Ünïcödé
    ٣٤٥
    x²
""".split()
EMOJI = "🙂 🎉 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ 🚀 🏳️‍🌈 🤷🏻‍♀️ 😂😂😂 𝔘𝔫𝔦".split() + ["  ", "\n\n", "\t", "  \n", " 12 345", "it's IT'S"]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {"smollm": (r"\p{N}", GPT2), "qwen2": ("", WORDS % r"\p{N}"), "llama-bpe": ("", WORDS % r"\p{N}{1,3}")}


def texts() -> dict[str, str]:
    draw, mixed = random.Random(5), ""
    while len(mixed) < 10_000:
        mixed += draw.choice(SENTENCES) + (draw.choice(EMOJI) if draw.random() < 0.5 else "")
        mixed += "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(8)) if draw.random() < 0.3 else ""
    code = "".join((ROOT / "kvlab" / name).read_text() for name in ("policy.py", "decode.py"))
    return {"licence": (ROOT / "LICENSE").read_text()[:11_000], "python": code[:11_000], "chinese": mixed}


def pieces(path: str):
    """SentencePiece over a GGUF file's pieces."""
    fields = gguf.GGUFReader(path).fields
    get = lambda key: fields[f"tokenizer.ggml.{key}"].contents()
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(get("tokens"), get("scores"), get("token_type")):
        model.pieces.add(piece=token.replace(" ", "▁") if kind == 4 else token, score=score, type=kind)
    unknown = get("unknown_token_id")
    model.pieces[unknown].type = 2
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback, model.trainer_spec.unk_id = 2, True, unknown
    model.normalizer_spec.name, model.normalizer_spec.escape_whitespaces = "identity", True
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()).encode


def byte_level(raw: dict, pre: str):
    """tiktoken over SmolLM2's merges: what a merge makes ranks as the merge does."""
    from tokenizers import pre_tokenizers

    printable = {chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    printable |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if chr(b) not in printable)}
    assert set(printable) == set(pre_tokenizers.ByteLevel.alphabet())
    plain = lambda token: bytes(printable[c] for c in token)
    vocab, merges = raw["model"]["vocab"], raw["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    ranks = {bytes([b]): b for b in range(256)} | {plain(t): 256 + i for i, t in reversed(list(enumerate(made)))}
    ids = {ranks[plain(t)]: i for t, i in vocab.items() if all(c in printable for c in t) and plain(t) in ranks}
    first, second = CUTS[pre]
    library = tiktoken.Encoding(pre, pat_str=second, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=None)

    def encode(text):
        parts = regex.findall(f"{first}|[^{first}]+" if first else r"(?s).+", text)
        return [ids[r] for part in parts for r in library.encode(part, disallowed_special=())]

    return encode


def main():
    saved = {f"text_{name}": np.frombuffer(text.encode(), np.uint8) for name, text in texts().items()}
    raw = json.loads((fetch.find("smollm2-135m") / "tokenizer.json").read_text())
    encoders = {"gemma": pieces(sys.argv[1])} | {pre: byte_level(raw, pre) for pre in CUTS}
    for kind, encode in encoders.items():
        saved |= {f"{kind}_{name}": np.array(encode(text), np.int32) for name, text in texts().items()}
    np.savez_compressed(HERE / "tokenizer_golden.npz", **saved)
    print({name: x.size for name, x in saved.items()})


if __name__ == "__main__":
    main()
