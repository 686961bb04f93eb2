"""The tokenizer and chat template that a GGUF file carries: byte-level BPE, written small.

Text is cut into words, each word's bytes are spelled in a printable alphabet, and the best-ranked neighbouring pair
is merged until no known pair is left. Control tokens never come out of text: only the chat template writes them, so a
user who types `<|im_end|>` ends nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Final

_CONTROL_TOKEN: Final = 3
"""`tokenizer.ggml.token_type` of tokens that text cannot produce (GGUF specification)."""

_WORD: Final = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
"""GPT-2's words. Numerals do not occur in them: the pre-tokenizer "smollm" takes those out one by one first."""

_REPLACEMENT: Final = "\ufffd"

_SYSTEM_PROMPT: Final = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)


def _printable_bytes() -> dict[int, str]:
    """Give every byte a printable character, as GPT-2 does: itself where it has one, else one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def _is_numeral(character: str) -> bool:
    return unicodedata.category(character).startswith("N")


_ALPHABET: Final = _printable_bytes()
_BYTE_OF: Final = {character: byte for byte, character in _ALPHABET.items()}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat: who says it (`system`, `user`, `assistant`), and what."""

    role: str
    content: str


class Tokenizer:
    """Turns text into token ids and back.

    Args:
        tokens: the vocabulary in the printable alphabet; a token's index is its id.
        merges: pairs "left right", best rank first.
        token_types: kind of each token in the numbering of GGUF.
        pre_tokenizer: name of the way in which text is cut into words; only "smollm" is known here.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Iterable[str], token_types: Sequence[int], pre_tokenizer: str
    ) -> None:
        if pre_tokenizer != "smollm":
            raise ValueError(
                f"the model file asks for the pre-tokenizer {pre_tokenizer!r}; this one knows 'smollm' only"
            )
        self._tokens = list(tokens)
        self._id_of = {token: index for index, token in enumerate(self._tokens)}
        self._rank_of = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._control = frozenset(i for i, kind in enumerate(token_types) if kind == _CONTROL_TOKEN)
        self._encode_word = lru_cache(maxsize=1 << 14)(self._merge)

    def __len__(self) -> int:
        return len(self._tokens)

    def control_id(self, token: str) -> int:
        """Return the id of a control token such as `<|im_end|>`. `KeyError` when the vocabulary has none."""
        index = self._id_of[token]
        if index not in self._control:
            raise KeyError(token)
        return index

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; control tokens in it are read as the characters they are written with.

        A character that needs a byte without a token (some control characters, lone surrogates) becomes U+FFFD.
        """
        ids: list[int] = []
        for is_numeral, run in groupby(text, _is_numeral):
            for word in run if is_numeral else _WORD.findall("".join(run)):
                ids.extend(self._encode_word(word))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without its control tokens; bytes that are no UTF-8 become U+FFFD."""
        spelled = "".join(self._tokens[i] for i in ids if i not in self._control)
        return bytes(_BYTE_OF[character] for character in spelled).decode("utf-8", errors="replace")

    def _spell(self, character: str) -> list[str]:
        parts = [_ALPHABET[byte] for byte in character.encode(errors="ignore")]  # a lone surrogate has no bytes
        return parts if parts and self._id_of.keys() >= set(parts) else self._spell(_REPLACEMENT)

    def _merge(self, word: str) -> tuple[int, ...]:
        parts = [part for character in word for part in self._spell(character)]
        unknown = len(self._rank_of)
        while len(parts) > 1:
            ranks = [self._rank_of.get(pair, unknown) for pair in pairwise(parts)]
            best = min(ranks)
            if best == unknown:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self._id_of[part] for part in parts)


class ChatTemplate:
    """The ChatML format of the model file: `<|im_start|>role`, a line break, the content, `<|im_end|>`, a line break.

    A conversation is continued by appending to its token ids, never by writing its text anew: a model may spell an
    answer in other tokens than the tokenizer would, and then the cached prefix would end in the middle of it.

    Args:
        template: the Jinja text from the model file. It is not run; it is checked to be ChatML, and its default
            system prompt is taken from it.
        tokenizer: the tokenizer of the same file.
    """

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        system = _SYSTEM_PROMPT.search(template)
        if system is None or "'<|im_start|>assistant\n'" not in template:
            raise ValueError("the model file's chat template is not ChatML with a default system prompt")
        self.system_prompt = system.group(1)
        self._tokenizer = tokenizer
        self._start = tokenizer.control_id("<|im_start|>")
        self.end_of_message = tokenizer.control_id("<|im_end|>")

    def open(self, first_message: str) -> list[int]:
        """Return the prompt of a first turn: system prompt, the user's message, and the assistant's opening."""
        return self.render([Message("system", self.system_prompt), Message("user", first_message)])

    def extend(self, talk: Sequence[int], next_message: str) -> list[int]:
        """Return the prompt of a later turn: the ids of all that was said, exactly, and the user's new message.

        Args:
            talk: the last prompt and its answer. An answer that was cut off before its end marker gets one.
            next_message: what the user says now.
        """
        closed = talk if talk[-1] == self.end_of_message else [*talk, self.end_of_message]
        line_break = self._tokenizer.encode("\n")
        return [*closed, *line_break, *self._message(Message("user", next_message)), *self._opening()]

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return a whole chat written anew from its text, ready for the assistant to answer."""
        return [i for message in messages for i in self._message(message)] + self._opening()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of an answer."""
        return self._tokenizer.decode(ids)

    def _message(self, message: Message) -> list[int]:
        text = self._tokenizer.encode(f"{message.role}\n{message.content}")
        return [self._start, *text, self.end_of_message, *self._tokenizer.encode("\n")]

    def _opening(self) -> list[int]:
        return [self._start, *self._tokenizer.encode("assistant\n")]
