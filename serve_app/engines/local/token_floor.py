"""How many tokens a text has at least, told without tokenising it: what can never fit is refused at once.

A token holds at most as many letters, and at most as many bytes, as the longest one of the vocabulary. That is a bound
only on bytes that end up in a token: those without a token of their own do not count (a tokenizer drops them; SmolLM2
has none for six control characters), and the floor is 0 for tokenizers that may drop others.

What this module does not do: estimate; the true count may be ten times the floor.
"""

from __future__ import annotations

import json
import string
from typing import Any

from serve_app.engines.local.vocabulary import Vocabulary

_NO_LETTERS = bytes(set(range(256)) - set(string.ascii_letters.encode()))
# Unicode composition (NFC) makes one character of at most four, and no character's encoding longer than its parts'.
_COMPOSED = 4
_COMPOSABLE = {*range(0x80, 0xC0), *range(0xC2, 0xF1)}  # bytes of the characters that composition can make
_KEEPING = frozenset({"ByteLevel", "Digits"})


class TokenFloor:
    """Lower bounds for a transformers tokenizer's counts."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._shrink = _shrink(tokenizer) if vocabulary.byte_level else 0
        pieces = [vocabulary.bytes_of(token) for token in set(tokenizer.get_vocab().values())] if self._shrink else []
        self._bytes = max(map(len, pieces), default=1)
        self._letters = max((_letters(piece) for piece in pieces), default=1)
        known = {piece[0] for piece in pieces if len(piece) == 1}
        self._dropped = bytes(set(range(256)) - known)
        if self._shrink > 1 and not known >= _COMPOSABLE:
            self._shrink = 0

    def __call__(self, text: str) -> int:
        """Never more than the tokens of the text. Special tokens in it may count as such or as text."""
        if not self._shrink:
            return 0
        raw = text.encode().translate(None, self._dropped)
        if not text.isascii() and self._shrink > 1:
            return -(-len(raw) // (self._bytes * self._shrink))
        return max(-(-len(raw) // self._bytes), -(-_letters(raw) // self._letters))


def _letters(raw: bytes) -> int:
    return len(raw.translate(None, _NO_LETTERS))


def _shrink(tokenizer: Any) -> int:
    """By what factor text may shrink before it is cut into tokens; 0 when it may lose more."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]) or parts.get("truncation"):
        return 0
    steps = _flat(parts.get("pre_tokenizer"), "pretokenizers")
    if not all(step["type"] in _KEEPING or _keeps(step) for step in steps):
        return 0
    kinds = {step["type"] for step in _flat(parts.get("normalizer"), "normalizers")}
    return 1 if not kinds else _COMPOSED if kinds == {"NFC"} else 0


def _keeps(step: dict[str, Any]) -> bool:
    return step["type"] == "Split" and step["behavior"] != "Removed"


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [leaf for part in step[inner] for leaf in _flat(part, inner)] if step["type"] == "Sequence" else [step]
