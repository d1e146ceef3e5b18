"""SGLang's tool parsers as `reading` wants them.

What this module does not do: choose a format (`tooling`), or decide what is told of an answer (`reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

Found = tuple[str, Sequence[Any]]
# Where SGLang's classes have the marks around a block of calls.
_OPENING = "bot_token", "tool_call_start_token", "TOOL_CALL_START"
_CLOSING = "eot_token", "tool_call_end_token", "TOOL_CALL_END"
# By the name of a class that does not have it.
_OPENINGS = {"GigaChat3Detector": "<|function_call|>"}


class NativeParser:
    """The format of the model, by SGLang's FunctionCallParser."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.opening = _mark(parser.detector, _OPENING) or _OPENINGS.get(type(parser.detector).__name__, "")
        self.closing = _mark(parser.detector, _CLOSING)
        self.parse_stream_chunk: Callable[[str], Found] = parser.parse_stream_chunk
        self.parse_non_stream: Callable[[str], Found] = parser.parse_non_stream

    @property
    def left(self) -> int:
        return int(self._parser.detector.current_tool_id)


def _mark(detector: Any, names: Sequence[str]) -> str:
    return next((mark for name in names if (mark := str(getattr(detector, name, "")))), "")


class HarmonyParser:
    """The messages of gpt-oss, each by a parser of its own.

    SGLang's keeps what is in no message, as what its reasoning parser leaves of one is, and gives it again with the
    next call, or once a word in it is a channel's name. It is text here.

    Args:
        make: SGLang's FunctionCallParser.
    """

    opening, closing = "<|channel|>commentary to=", "<|call|>"
    left = -1  # a call is told with its arguments
    _BEGIN, _END = ("<|start|>", "<|channel|>"), ("<|end|>", "<|call|>", "<|return|>")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._parser = make, None

    def parse_stream_chunk(self, chunk_text: str) -> Found:
        if self._parser is None and chunk_text.startswith(self._BEGIN):
            self._parser = self._make()
        if self._parser is None:
            return chunk_text, ()
        found: Found = self._parser.parse_stream_chunk(chunk_text)
        if chunk_text.endswith(self._END):
            self._parser = None
        return found

    def parse_non_stream(self, full_text: str) -> Found:
        """SGLang looks for the beginning of a message, which the first one of an answer has in its prompt."""
        begun = full_text if full_text.startswith(self._BEGIN[0]) else f"{self._BEGIN[0]}assistant{full_text}"
        found: Found = self._make().parse_non_stream(begun)
        return found


class ArrayParser:
    """An array of calls, what an answer is where a JSON schema holds it to calls. Nothing in it is text."""

    def __init__(self, tools: Sequence[Any]) -> None:
        from sglang.srt.function_call.json_array_parser import JsonArrayParser

        self._detector, self._tools = JsonArrayParser(), tools
        self.opening, self.closing = self._detector.bot_token, self._detector.eot_token

    @property
    def left(self) -> int:
        return int(self._detector.current_tool_id)

    def parse_stream_chunk(self, chunk_text: str) -> Found:
        return "", self._detector.parse_streaming_increment(chunk_text, self._tools).calls

    def parse_non_stream(self, full_text: str) -> Found:
        from sglang.srt.function_call.core_types import ToolCallItem

        try:
            calls = orjson.loads(full_text)
        except ValueError:
            return "", ()  # it was cut
        return "", [
            ToolCallItem(tool_index=index, name=call["name"], parameters=orjson.dumps(call["parameters"]).decode())
            for index, call in enumerate(calls)
        ]
