"""Keeps control tokens to the chat template: what a message spells is text, also where it spells `<|im_end|>`.

Spellings of special tokens in messages travel through the template as placeholders. The rendered text is then cut at
the special tokens that are left in it, which the template wrote; what lies between is encoded without special tokens.
Messages that spell none are encoded as one text, as transformers does.

What this module does not do: touch added tokens that the tokenizer does not call special (Qwen's `<think>`), or raw
prompts, in which special tokens keep their meaning.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from serve_app.errors import InvalidRequest


class LiteralEncoder:
    """Encodes rendered chats with a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {token.content: (id, token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids = {spelling: id for spelling, (id, _) in added.items()}
        self._control_ids = frozenset(self._ids.values())
        # The longest first: as the tokenizer, which takes the longest of those that begin at the same place.
        self._spellings = sorted(added, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._spellings)) or "(?!)")
        patterns = [
            ("\\s*" if added[s][1].lstrip else "") + re.escape(s) + ("\\s*" if added[s][1].rstrip else "")
            for s in self._spellings
        ]
        self._control = re.compile("|".join(patterns) or "(?!)")
        self._backend: Tokenizer | None = None
        self._shared: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if (backend := self._shared) is not None:
            # A copy: the switch belongs to the tokenizer, which other threads use.
            self._backend = Tokenizer.from_str(backend.to_str())
            self._backend.no_truncation()
            self._backend.encode_special_tokens = True

    def shield(self) -> Shield:
        """A fresh set of placeholders, for one chat."""
        return Shield(self._spelled, self._spellings)

    def encode(self, rendered: str, shield: Shield) -> list[int]:
        """Token ids of a text rendered from what `shield` covered, without start tokens of the tokenizer's own.

        Raises:
            InvalidRequest: the tokenizer has no other way to write what was spelled than the special token.
        """
        if not shield.used:
            return self._whole(rendered)
        ids: list[int] = []
        end = 0
        for match in self._control.finditer(rendered):
            ids += self._text(shield.lift(rendered[end : match.start()]))
            spelling = match[0]
            ids.append(self._ids[spelling if spelling in self._ids else spelling.strip()])
            end = match.end()
        return ids + self._text(shield.lift(rendered[end:]))

    def _whole(self, text: str) -> list[int]:
        """As transformers encodes it, special tokens included: by the tokenizer's own backend, where nobody has told
        that to cut, pad or spell. What transformers does around it takes a third of the time."""
        shared = self._shared
        if shared is None or shared.truncation or shared.padding or shared.encode_special_tokens:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return _unlocked(shared, text)

    def _text(self, text: str) -> list[int]:
        if not text:
            return []
        if self._backend is None:
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            ids = list(self._tokenizer(text, **options)["input_ids"])
        else:
            ids = _unlocked(self._backend, text)
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequest(
                "the messages spell a special token, which this tokenizer cannot write as text", param="messages"
            )
        return ids


def _unlocked(backend: Tokenizer, text: str) -> list[int]:
    """Token ids, while other threads run: `Tokenizer.encode` keeps the interpreter to itself, a batch does not."""
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class Shield:
    """Placeholders of one chat: digits between two private characters, with a number nobody can guess.

    Attributes:
        used: whether anything had to be covered.
    """

    def __init__(self, spelled: re.Pattern[str], spellings: list[str]) -> None:
        self._spelled, self._spellings = spelled, spellings
        self._mark = f"\ue000{secrets.randbits(64)}\ue001"
        self.used = False

    def cover(self, value: Any) -> Any:
        """The value, with every special token's spelling in its strings, keys included, replaced."""
        if isinstance(value, str):
            return self._spelled.sub(self._placeholder, value)
        if isinstance(value, Mapping):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cover(item) for item in value]
        return value

    def _placeholder(self, match: re.Match[str]) -> str:
        self.used = True
        return f"{self._mark}{self._spellings.index(match[0])}\ue001"

    def lift(self, text: str) -> str:
        """Text with the spellings back in place."""
        if not self.used:
            return text
        return re.sub(f"{self._mark}(\\d+)\ue001", lambda match: self._spellings[int(match[1])], text)
