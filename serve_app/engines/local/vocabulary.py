"""Token ids as bytes, from a transformers tokenizer.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM) map every token to exact bytes; sentencepiece ones have byte
tokens `<0xE2>` beside text. Both are needed to cut text at whole characters and to report a token's bytes.

What this module does not do: encode, or keep state between tokens (`detokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Bytes of tokens.

    Attributes:
        byte_level: whether text is exactly the concatenation of `bytes_of` (byte-level vocabularies).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.byte_level = _is_byte_level(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self._added = tokenizer.get_added_vocab()
        self._added_ids = frozenset(self._added.values())
        self._bytes: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of text."""
        return token in self._special

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, special tokens as they are spelled; empty for an id without a token."""
        raw = self._bytes.get(token)
        if raw is None:
            # No more of them than there are tokens: ids come from the model, or were checked.
            raw = self._bytes[token] = self._spelled(token)
        return raw

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """What the tokens add to a text, for byte-level vocabularies."""
        return b"".join([self.bytes_of(token) for token in tokens if token not in self._special])

    def _spelled(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(int(token))
        if piece is None:
            return b""
        if token in self._added_ids:
            return str(piece).encode()
        if self.byte_level:
            table = _byte_of_char()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return str(piece).encode()
        match = _BYTE_TOKEN.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def text_of(self, token: int) -> str:
        """The token alone as text; incomplete characters become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a whole sequence, special tokens left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return bool(decoder.get("type") == "ByteLevel")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable latin characters stand for themselves, other bytes for those from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table
