"""The text of one choice, read for reasoning and calls while its tokens come.

It is read token by token, however many a step accepted, so that what is told is a function of the token ids alone. An
answer that goes on behind another replica's tokens is read from its beginning, and only what is new is told.

What this module does not do: find anything in the text (`reading`), or end it where no call ends it (`TextStream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.engines.local.stopping import Ending, TextStream
from serve_app.engines.sglang.pieces import Pieces
from serve_app.engines.sglang.reading import Call, Said, ToolReader
from serve_app.engines.sglang.reasoning import ReasoningReader
from serve_app.errors import InvalidRequest


class Reader:
    """Both. `exact`, of the reasoning: see `ReasoningReader`.

    Args:
        closing: the token that is the tools' `closing` mark, None where none is.
    """

    def __init__(self, reasoning: ReasoningReader | None, tools: ToolReader | None, closing: int | None = None) -> None:
        self._reasoning, self._tools, self._closing = reasoning, tools, closing
        marks = [*(reasoning.marks if reasoning else ()), *(tools.marks if tools else ())]
        self._pieces = Pieces(marks)
        self._again = Pieces(tools.marks if tools else ()) if reasoning else None
        self.said = Said()

    @property
    def reasons(self) -> bool | None:
        """Whether the next token is reasoning; None where that is not known exactly."""
        return self._reasoning.inside if self._reasoning is not None and self._reasoning.exact else None

    @property
    def calls(self) -> list[Call]:
        return self._tools.calls if self._tools else []

    @property
    def full(self) -> bool:
        return self._tools is not None and self._tools.full

    def push(self, text: str) -> None:
        for piece in self._pieces.push(text):
            self._piece(piece)

    def _piece(self, piece: str) -> None:
        self._rest(piece if self._reasoning is None else self._reasoning.push(piece, self.said))

    def _rest(self, text: str) -> None:
        if self._tools is None:
            self.said.content += text
        elif self._again is None:
            self._tools.push(text, self.said)
        else:  # some reasoning parsers put pieces together
            for piece in [*self._again.push(text), *self._again.flush()]:
                self._tools.push(piece, self.said)

    def end(self, token: int | None = None) -> None:
        """`token`: the one that ended the answer, where one did. It is no text, but may be the mark behind a call."""
        if self._tools is not None and token is not None and token == self._closing:
            self.push(self._tools.closing)
        for piece in self._pieces.flush():
            self._piece(piece)
        if self._reasoning is not None:
            self._rest(self._reasoning.end(self.said))
        if self._tools is not None:
            self._tools.end(self.said)

    def take(self) -> Said:
        said, self.said = self.said, Said()
        return said


class ParsedStream:
    """A TextStream whose text is read. `push` and `finish` give content alone; `delta` has the rest of it."""

    def __init__(self, text: TextStream, reader: Reader) -> None:
        self._text, self._reader = text, reader
        self._reasoning = 0

    @property
    def count(self) -> int:
        return self._text.count

    @property
    def reasoning_tokens(self) -> int | None:
        return None if self._reader.reasons is None else self._reasoning

    def resume(self, tokens: Sequence[int]) -> None:
        """As `TextStream.resume`."""
        if any(self._one(token) is not None for token in tokens):
            raise InvalidRequest("the emitted tokens already end the text", param="emitted")
        self._reader.take()

    def push(self, tokens: Sequence[int]) -> tuple[int, str, Ending | None]:
        """As `TextStream.push`."""
        for used, token in enumerate(tokens, 1):
            if (ending := self._one(token)) is not None:
                return used, self._content(), ending
        return len(tokens), self._content(), None

    def _one(self, token: int) -> Ending | None:
        before = self._reader.reasons
        _, text, ending = self._text.push([token])
        self._reader.push(text)
        if ending is not None:
            by_token = ending.reason == "stop" and not isinstance(ending.detail, str)
            self._reader.end(token if by_token else None)
        self._reasoning += bool(before or self._reader.reasons)
        return self.ended(ending) if ending is not None or self._reader.full else None

    def ended(self, ending: Ending | None) -> Ending:
        """An end, after a call in OpenAI's words; None where only the answer's calls end it. A stop of the client's may
        have cut the call short."""
        calls = self._reader.calls
        if ending is None or self._reader.full:
            return Ending("tool_calls")
        if calls and ending.reason == "stop" and (ending.detail is None or calls[-1].whole):
            return Ending("tool_calls", ending.detail)
        return ending

    def finish(self) -> str:
        self._reader.push(self._text.finish())
        self._reader.end()
        return self._content()

    def _content(self) -> str:
        content, self._reader.said.content = self._reader.said.content, ""
        return content

    def delta(self) -> Mapping[str, Any] | None:
        """Reasoning and calls since it was asked last."""
        return self._reader.take().delta()
