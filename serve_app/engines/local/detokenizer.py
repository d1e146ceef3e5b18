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

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any vocabulary: decode a short window with and without its new tokens, emit the difference.

    The window starts at a token where earlier text was certain, so that decoders which treat the first token apart
    (leading spaces) see the same left context twice. Text that ends in U+FFFD is held back.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._start = 0  # first token of the window
        self._read = 0  # tokens whose text has been emitted

    def push(self, token: int) -> str:
        self._tokens.append(token)
        delta = self._delta()
        if not delta or delta.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return delta

    def flush(self) -> str:
        delta = self._delta()
        self._start = self._read = len(self._tokens)
        return delta

    def _delta(self) -> str:
        before = self._vocabulary.decode(self._tokens[self._start : self._read])
        after = self._vocabulary.decode(self._tokens[self._start :])
        return after[len(before) :]


def detokenize_reference(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """What all deltas must add up to."""
    return vocabulary.decode(tokens)
