"""Pieces of an answer → content, reasoning and tool calls, by SGLang's own parsers.

SGLang's parsers want their text in pieces, and what they find depends on where the pieces end. So each of their marks
is a piece of its own.

A parser keeps what may still become a call, and forgets what did not: what it took and made nothing of is text here,
but for the end of a malformed call after one that was told. What it did not say of a call's arguments in pieces, its
reading of the whole text does.

What this module does not do: know a format, or SGLang's classes (`tooling` makes them); tokens (`parsed`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from serve_app.engines.local.stopping import overlap

logger = logging.getLogger(__name__)
# Within a call a parser reads all of it again for each piece: it gets pieces of at least this share of what it has, so
# that a call costs what it is long.
_SHARE = 64
# Shorter ones, such as a bracket, are in any text.
_SHORTEST_MARK = 4
_MARKUP = re.compile(r"</?[\w|\uff5c\u2581]+>|```")


class ToolParser(Protocol):
    """SGLang's FunctionCallParser, or what reads an array of calls. `detector` has the format's marks."""

    detector: Any

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, Sequence[Any]]: ...

    def parse_non_stream(self, full_text: str) -> tuple[str, Sequence[Any]]: ...


class Pieces:
    """Cuts a text around marks; what may still become one is held back."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = [mark for mark in marks if mark and len(mark) >= _SHORTEST_MARK]
        self._held = ""

    def push(self, text: str) -> list[str]:
        self._held += text
        pieces = []
        while found := [(at, len(mark)) for mark in self._marks if (at := self._held.find(mark)) >= 0]:
            at, length = min(found)
            pieces += [self._held[:at], self._held[at : at + length]]
            self._held = self._held[at + length :]
        cut = len(self._held) - max((overlap(self._held, mark) for mark in self._marks), default=0)
        pieces.append(self._held[:cut])
        self._held = self._held[cut:]
        return [piece for piece in pieces if piece]

    def flush(self) -> list[str]:
        held, self._held = self._held, ""
        return [held] if held else []


class Call:
    """A call of the answer. `arguments`: what was told of them so far."""

    def __init__(self, name: str) -> None:
        self.name, self.arguments = name, ""
        self._judged: tuple[int, bool] = 0, False

    @property
    def whole(self) -> bool:
        """Whether they are JSON, which nothing can be added to."""
        if self._judged[0] != len(self.arguments):
            self._judged = len(self.arguments), _is_json(self.arguments)
        return self._judged[1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # nested deeper than anybody reads
        return False
    return True


class Said:
    """What is to be told: content, reasoning, and calls in OpenAI's words, each call once."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, dict[str, Any]] = {}

    def delta(self) -> dict[str, Any] | None:
        found: dict[str, Any] = {"reasoning_content": self.reasoning} if self.reasoning else {}
        if self.calls:
            found["tool_calls"] = list(self.calls.values())
        return found or None


class ToolReader:
    """Content and calls of a text that has no reasoning in it.

    Args:
        make: a parser without a past. names: of the tools. name_call: the id of a call, from its name and its number in
            the answer. one: the answer ends with its first call. must: it is calls and nothing else, which a grammar
            that goes on behind the last one does not hold it to.

    Attributes:
        calls: those of the answer. full: it has all that it may have. marks: of the format, those that are no text.
    """

    def __init__(
        self,
        make: Callable[[], ToolParser],
        names: Collection[str],
        name_call: Callable[[str, int], str],
        one: bool,
        must: bool,
    ) -> None:
        self._make, self._names, self._name_call, self._one, self._must = make, names, name_call, one, must
        self.calls: list[Call] = []
        self.full = False
        self._wait = ""  # pieces that make one
        self._space = ""  # it is text if text follows, and the format's where a call does
        self._raw = False  # within a call that is none
        self._renew()
        self._open, self._close = str(self._parser.detector.bot_token), str(self._parser.detector.eot_token)
        self.marks = [mark for mark in (self._open, self._close) if len(mark) >= _SHORTEST_MARK]

    def _renew(self) -> None:
        """A parser for what follows. `_block`: all that it got. `_taken`: what it got since it last gave something.
        `_shut`: the block ended, it seems, within a call; a mark may be a part of an argument. `_behind`: text was told
        behind a call of the block."""
        self._parser = self._make()
        self._block = self._taken = ""
        self._shut = self._behind = False
        self._first, self._numbers = len(self.calls), dict[int, int]()

    def push(self, piece: str, said: Said) -> None:
        if piece in self.marks:
            self._flush(said)
        elif self._cut or self._began(self._taken):
            self._wait += piece
            if len(self._wait) >= len(self._block) // _SHARE:
                self._flush(said)
            return
        self._push(piece, said)

    def _flush(self, said: Said) -> None:
        piece, self._wait = self._wait, ""
        if piece:
            self._push(piece, said)

    def _push(self, piece: str, said: Said) -> None:
        if self.full:
            return
        if self._raw:
            self._raw = piece not in self.marks
            if self._raw or piece == self._close:
                return self._text(piece, said)
        if piece == self._open and self._shut and self._cut:
            self._give_up(said)
        before = self._taken
        self._block, self._taken = self._block + piece, self._taken + piece
        text, items = self._feed(self._parser.parse_stream_chunk, piece)
        if items:
            self._text(text, said)
            if not self._items(items, said):
                self._raw = piece != self._close  # it calls what there is not
                return self._give_up(said)
        elif text.strip() and self._began(before):
            self._raw = piece != self._close  # the parser gave up what it had taken for a call
            return self._give_up(said)
        elif text and (text.strip() or not before):
            self._shown(text, said)
        if piece == self._close:
            if piece in self.marks:
                self._closed(said)
            elif self._one and self.calls and not self._cut:
                self.full = True  # a bracket behind the call
        return None

    def _feed(self, parse: Callable[[str], tuple[str, Sequence[Any]]], text: str) -> tuple[str, Sequence[Any]]:
        try:
            found, items = parse(text)
        except Exception as error:  # it is the model's text that it could not read, which is not for the log
            logger.warning("SGLang's tool parser failed: %s", type(error).__name__)
            return "", ()
        return found or "", items

    def _began(self, text: str) -> bool:
        """Whether a call begins in it."""
        return self._open in self.marks and self._open in text

    @property
    def _cut(self) -> bool:
        """Whether the block's last call is not whole."""
        return len(self.calls) > self._first and not self.calls[-1].whole

    def _closed(self, said: Said) -> None:
        """A block of calls ended, unless the mark is a part of an argument."""
        if self._cut or self._began(self._taken):
            self._look_back(said)
        if self._began(self._taken):
            self._give_up(said)
        elif self._cut:
            self._shut = True
        else:
            self.full |= self._one and bool(self.calls)
            self._renew()

    def _give_up(self, said: Said) -> None:
        """What was taken is text."""
        self._text(self._taken, said)
        self._renew()

    def end(self, said: Said) -> None:
        """Tell what is left: nothing more comes."""
        self._flush(said)
        if self.full:
            return
        text, items = self._feed(self._parser.parse_stream_chunk, "")
        self._shown(text, said)
        self._items(items, said)
        self._look_back(said)
        if self._shut or not self._cut:
            bare = _MARKUP.sub("", self._taken.replace(self._close, "")).strip()
            # Marks by themselves, and those behind a call, are the format's.
            self._text(self._taken if bare and len(self.calls) == self._first else bare, said)
        if not self.calls:
            said.content += self._space

    def _look_back(self, said: Said) -> None:
        """Calls, and arguments, that the parser finds in the whole block only."""
        _, found = self._feed(self._make().parse_non_stream, self._block)
        for index, item in enumerate(item for item in found if item.name in self._names):
            call = self.calls[self._first + index] if self._first + index < len(self.calls) else None
            if call is None:
                if self._behind:
                    break  # what makes it was told as text
                self._item(-1 - index, item.name, item.parameters, said)
                self._taken = ""
            elif call.name == item.name and not call.whole and item.parameters.startswith(call.arguments):
                rest = item.parameters[len(call.arguments) :]
                self._add(self._first + index, call, rest, said)
                if rest:
                    self._taken = ""

    def _shown(self, text: str, said: Said) -> None:
        """The parser gave text, of the beginning of what it took or behind marks."""
        if text:
            self._text(text, said)
            self._taken = self._taken[len(text) :] if self._taken.startswith(text) else ""
            if len(self.calls) == self._first:
                self._block = self._taken

    def _items(self, items: Sequence[Any], said: Said) -> bool:
        """Whether all of them are calls of tools, or belong to one; else up to the first that does not."""
        for item in items:
            if item.name is not None and item.name not in self._names:
                return False
            self._item(item.tool_index, item.name, item.parameters, said)
            self._taken = ""
        return True

    def _item(self, number: int, name: str | None, arguments: str | None, said: Said) -> None:
        """`number` is the parser's, which starts anew with each."""
        if self.full or (name is None and len(self.calls) == self._first):
            return
        if name is not None:
            if self._one and self.calls:
                self.full = True
                return
            self._space = ""
            self._numbers[number] = len(self.calls)
            said.calls[len(self.calls)] = {
                "index": len(self.calls),
                "id": self._name_call(name, len(self.calls)),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            self.calls.append(Call(name))
        index = self._numbers.get(number, len(self.calls) - 1)
        self._add(index, self.calls[index], arguments or "", said)

    def _add(self, index: int, call: Call, arguments: str, said: Said) -> None:
        if arguments:
            call.arguments += arguments
            entry = said.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += arguments

    def _text(self, text: str, said: Said) -> None:
        if (self._one or self._must) and self.calls and self.calls[-1].whole and text.strip():
            self.full = True  # not every format has a mark behind a call
        if self.full:
            return
        self._behind |= len(self.calls) > self._first and bool(text.strip())
        shown = (self._space + text).rstrip()
        self._space = (self._space + text)[len(shown) :]
        said.content += shown


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
    def inside(self) -> bool:
        return bool(self._parser.detector._in_reasoning)

    def push(self, piece: str, said: Said) -> str:
        """Returns what is no reasoning."""
        reasoning, rest = self._parser.parse_stream_chunk(piece)
        said.reasoning += reasoning or ""
        return rest or ""

    def end(self, said: Said) -> str:
        held = self._parser.detector._buffer if self.exact else ""  # what might have become a mark
        reasoning, rest = self._parser.parse_stream_end()
        if held and not (reasoning or rest):
            reasoning, rest = (held, "") if self.inside else ("", held)
        said.reasoning += reasoning or ""
        return rest or ""
