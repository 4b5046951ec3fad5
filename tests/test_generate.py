"""Text out: streamed pieces, chat templates, beams, and what the command says of bad input."""

import json
import sys

import numpy as np
import pytest

from kvlab import cli, generate, models
from kvlab.beam import beam_search
from kvlab.codec import Int8, Raw
from kvlab.decode import Engine
from kvlab.errors import ModelError
from kvlab.evaluate.logits import log_softmax
from kvlab.layout import Contiguous
from kvlab.models import chat
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Window
from kvlab.sampling import Sampling
from kvlab.selection import ReadAll
from tests import tools

FULL = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(tiny)


def test_what_is_shown_is_what_was_generated(engine):
    ids, shown = list(b"Once upon a time"), []
    figures = generate.generate(engine, FULL, ids, 12, show=shown.append)
    session = engine.start(engine.prefill([ids]), FULL, 12)
    session.run(11)
    assert "".join(shown) == figures["text"] and figures["tokens"] == 12
    whole = engine.model.tokenizer.decode(session.tokens[0])
    assert whole == figures["text"] and figures["resident_ratio"] == pytest.approx(1.0)
    drawn = generate.generate(engine, FULL, ids, 12, Sampling(temperature=2.0).rows(1), seed=1)
    again = generate.generate(engine, FULL, ids, 12, Sampling(temperature=2.0).rows(1), seed=1)
    assert drawn["text"] == again["text"] != figures["text"]


def test_characters_in_pieces_are_held_back():
    words = generate.Words(tools.Bytes())
    pieces = [words.add([b]) for b in "né 🙂!".encode()]
    assert pieces == ["n", "", "é", " ", "", "", "", "🙂", "!"]
    assert words.add("🙂".encode()[:2]) == "" and words.flush() == "\ufffd"


def test_conversations_follow_the_models_template():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert chat.render(TEMPLATE, messages, eos="</s>") == "<|system|>Be brief.</s><|user|>Hi</s><|assistant|>"
    with pytest.raises(ModelError, match="refuses these messages: no tools"):
        chat.render(TEMPLATE, [{"role": "tool", "content": ""}])
    with pytest.raises(ModelError, match="no chat template.*give plain text"):
        chat.render(None, messages)
    with pytest.raises(ModelError, match="template fails"):
        chat.render("{{ messages.__class__.__mro__ }}", messages)


def test_templates_are_found_where_models_keep_them(tmp_path):
    assert chat.template(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"chat_template": "a"}))
    assert chat.template(tmp_path) == "a"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "b"}))
    assert chat.template(tmp_path) == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert chat.template(tmp_path) == "c"


@pytest.mark.parametrize(
    "policy,width", [(FULL, 3), (FULL, 1), (Policy(Window(40, 4), Int8("channel"), Contiguous(), ReadAll()), 1)], ids=str
)
def test_beams_are_those_of_a_search_without_a_cache(engine, policy, width):
    """Every beam prefilled afresh at every step; a beam of one is greedy decoding, also under a lossy policy."""
    prompt, steps = list(b"the quick brown fox"), 5
    beams = beam_search(engine, prompt, policy, width, steps)
    assert [s for _, s in beams] == sorted((s for _, s in beams), reverse=True) and len({tuple(t) for t, _ in beams}) == width
    if width == 1:
        greedy = engine.start(engine.prefill([prompt]), policy, steps)
        greedy.run(steps - 1)
        assert beams[0][0] == greedy.tokens[0].tolist()
    if policy is not FULL:
        return
    naive = [([], 0.0)]
    for _ in range(steps):
        logp = log_softmax(engine.prefill([prompt + text for text, _ in naive]).logits_BV)
        grown = [(text + [t], s + float(logp[i, t])) for i, (text, s) in enumerate(naive) for t in range(logp.shape[1])]
        naive = sorted(grown, key=lambda b: -b[1])[:width]
    assert [t for t, _ in beams] == [t for t, _ in naive]
    np.testing.assert_allclose([s for _, s in beams], [s for _, s in naive], atol=1e-3)


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["kvlab", "generate", *args])
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_the_command_prints_text_speed_and_bytes(tiny, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(models, "load", lambda name: tiny)
    (tmp_path / "p.toml").write_text('codec = "int8"\nretention = { name = "window", size = 60 }\n')
    args = ("hello", "--policy", str(tmp_path / "p.toml"), "--new-tokens", "5", "--json", str(tmp_path / "g.json"))
    assert run(monkeypatch, *args) == 0
    out, figures = capsys.readouterr().out, json.loads((tmp_path / "g.json").read_text())
    assert out.startswith(figures["text"]) and "tokens/s" in out and f"{figures['resident_bytes']:,} bytes" in out
    assert figures["resident_ratio"] < 1 and figures["policy"] == "window size 60 + int8"


@pytest.mark.parametrize(
    "args,message",
    [
        (("",), "a prompt is empty"),
        (("hello", "--temperature", "-1"), "temperature=-1.0; allowed: ≥ 0"),
        (("hello", "--policy", "retention=widow"), "did you mean 'window'"),
        (("hello", "--policy", "missing.toml"), "No such file"),
        (("hello", "--new-tokens", "2000"), "exceed the 1024"),
        (("hello", "--chat"), "no chat template"),
        (("hello", "--system", "Be brief."), "write --chat too"),
        (("hello", "--new-tokens", "0"), "new_tokens=0"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_2(tiny, monkeypatch, capsys, args, message):
    monkeypatch.setattr(models, "load", lambda name: tiny)
    assert run(monkeypatch, *args) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], lines
