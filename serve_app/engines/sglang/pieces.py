"""A text in pieces: its marks, and what looks like one, by themselves.

What this module does not do: know what a mark means (`reading`, `reasoning`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.engines.local.stopping import overlap

# Shorter ones, such as a bracket, are in any text.
SHORTEST_MARK = 4
# Not every class of SGLang's says its marks, and a model need not have them as tokens.
_LONGEST = 64
_NAME = r"[\w|:\"\uff5c\u2581]"
MARKUP = re.compile(rf"</?{_NAME}{{1,{_LONGEST - 3}}}>")
_BEGUN = re.compile(rf"</?{_NAME}{{0,{_LONGEST - 3}}}\Z")


class Pieces:
    """Cuts a text around marks, and around what looks like one; what may still become one is held back."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = [mark for mark in marks if mark and len(mark) >= SHORTEST_MARK]
        longest = sorted(map(re.escape, self._marks), key=len, reverse=True)
        self._any = re.compile("|".join([*longest, MARKUP.pattern]))
        self._held = ""

    def push(self, text: str) -> list[str]:
        held, at, pieces = self._held + text, 0, list[str]()
        while (found := self._any.search(held, at)) and not self._more(held[found.start() :]):
            pieces += [held[at : found.start()], found[0]]
            at = found.end()
        held = held[at:]
        cut = len(held) - max((overlap(held, mark) for mark in self._marks), default=0)
        begun = _BEGUN.search(held, max(0, len(held) - _LONGEST)) if "<" in held else None
        cut = min(cut, begun.start()) if begun else cut
        self._held = held[cut:]
        return [piece for piece in [*pieces, held[:cut]] if piece]

    def _more(self, text: str) -> bool:
        """Whether it may become a mark that is longer."""
        return any(mark != text and mark.startswith(text) for mark in self._marks)

    def flush(self) -> list[str]:
        held, self._held = self._held, ""
        return [held] if held else []
