"""Reasoning and the rest of an answer, by SGLang's own parsers.

What this module does not do: find calls in the rest (`reading`).
"""

from __future__ import annotations

from typing import Any

from serve_app.engines.sglang.reading import Said


class ReasoningReader:
    """Reasoning and the rest.

    Args:
        parser: SGLang's ReasoningParser. exact: whether its state tells for each token what it is.
    """

    def __init__(self, parser: Any, exact: bool) -> None:
        self._parser = parser
        self.exact = exact
        detector = parser.detector
        self.marks = [detector.think_start_token, detector.think_end_token, detector.tool_start_token or ""]

    @property
    def _held(self) -> str:
        """What might have become a mark, or gpt-oss's first message."""
        if self.exact:
            return str(self._parser.detector._buffer)
        messages = getattr(self._parser.detector, "parser", None)
        return messages._buffer if messages is not None and messages.strategy is None else ""

    @property
    def inside(self) -> bool:
        return bool(self._parser.detector._in_reasoning)

    def push(self, piece: str, said: Said) -> str:
        """Returns what is no reasoning."""
        reasoning, rest = self._parser.parse_stream_chunk(piece)
        said.reasoning += reasoning or ""
        return rest or ""

    def end(self, said: Said) -> str:
        held = self._held
        reasoning, rest = self._parser.parse_stream_end()
        if held and not (reasoning or rest):
            reasoning, rest = (held, "") if self.exact and self.inside else ("", held)
        said.reasoning += reasoning or ""
        return rest or ""
