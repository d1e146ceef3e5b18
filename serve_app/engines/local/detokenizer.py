"""Tokens to text, a few at a time: deltas are whole characters and add up to the one-shot decoding.

What this module does not do: look for stop strings (`stopping`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from serve_app.engines.local.vocabulary import Vocabulary


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """Text that is certain after one more token; empty while a character is incomplete."""

    def push_all(self, tokens: Sequence[int]) -> str:
        """What `push` gives for them one after the other."""

    def flush(self) -> str:
        """What is left at the end: incomplete bytes as U+FFFD, as a one-shot decoding has them."""


def make_detokenizer(vocabulary: Vocabulary) -> Detokenizer:
    """The exact byte decoder where text is the tokens' bytes, the window decoder elsewhere."""
    return ByteDetokenizer(vocabulary) if vocabulary.byte_level else WindowDetokenizer(vocabulary)


class ByteDetokenizer:
    """For byte-level vocabularies: an incremental UTF-8 decoder over the tokens' bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if self._vocabulary.is_special(token):
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token))

    def push_all(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(self._vocabulary.text_bytes(tokens))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


# Tokens that may be held back. A character has at most 4 bytes; longer runs without a whole one are broken text.
_HELD = 16
_INCOMPLETE = 3


class WindowDetokenizer:
    """For any vocabulary: decode a short window with and without its new tokens, emit the difference.

    The window starts at a token where earlier text was certain, so that decoders which treat the first token apart
    (leading spaces) see the same left context twice. Text that ends in U+FFFD is held back, but never more than a few
    tokens of it: a window is bounded, and a text costs what it is long.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []  # tokens emitted last
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if self._vocabulary.is_special(token):
            return ""
        self._held.append(token)
        before, after = self._texts()
        if len(after) > len(before) and not after.endswith("\ufffd"):
            return self._emit(len(self._held), before, after)
        return self._oldest(before, after) if len(self._held) > _HELD else ""

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        return self._emit(len(self._held), *self._texts())

    def _texts(self) -> tuple[str, str]:
        decode = self._vocabulary.decode
        return decode(self._context), decode(self._context + self._held)

    def _emit(self, count: int, before: str, after: str) -> str:
        """Emit `count` held tokens, whose text takes the window's from `before` to `after`."""
        if len(after) > len(before):
            self._context = self._held[:count]
        self._held = self._held[count:]
        return after[len(before) :]

    def _oldest(self, before: str, after: str) -> str:
        """Emit held tokens but those that may still become a character."""
        longest = len(self._held) - _INCOMPLETE
        for count in range(longest, longest - _INCOMPLETE - 1, -1):
            text = self._vocabulary.decode(self._context + self._held[:count])
            if after.startswith(text):
                return self._emit(count, before, text)
        return self._emit(len(self._held), before, after)


def detokenize_reference(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """What all deltas must add up to."""
    return vocabulary.decode(tokens)
