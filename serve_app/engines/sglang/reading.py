"""Pieces of an answer → content and tool calls, by SGLang's own parsers.

What these find depends on where the pieces end. So each mark, and what looks like one, is a piece of its own, and
within a call the pieces end where the text says, not its tokens.

A parser keeps what may still become a call, and forgets what did not: what it took and made nothing of is text here,
but for the end of a malformed call after one that was told. What it did not say of a call's arguments in pieces, its
reading of the whole text does.

What this module does not do: know a format, or SGLang's classes (`tool_parsers`); cut marks out (`pieces`); reasoning
(`reasoning`); tokens (`parsed`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from serve_app.engines.sglang.pieces import MARKUP, SHORTEST_MARK

logger = logging.getLogger(__name__)
# Within a call a parser reads all of it again for each piece: it gets pieces of at least this share of what it has, so
# that a call costs what it is long. In a short one a bracket ends a piece too: it may be the end of the call.
_SHARE = 64
_LEAST = 4
_CLOSING = "}])>"
_MARKS = re.compile(f"{MARKUP.pattern}|```")


class ToolParser(Protocol):
    """Reads calls (`tool_parsers`).

    Attributes:
        opening, closing: around the calls, empty where the format has none. left: how many calls it has left behind;
            one of a lower number has all of its arguments.
    """

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    @property
    def left(self) -> int: ...

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, Sequence[Any]]: ...

    def parse_non_stream(self, full_text: str) -> tuple[str, Sequence[Any]]: ...


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
        closing: the last of them, empty where there is none.
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
        self._open, self._close = self._parser.opening, self._parser.closing
        self.closing = self._close if len(self._close) >= SHORTEST_MARK else ""
        self.marks = [mark for mark in (self._open, self._close) if len(mark) >= SHORTEST_MARK]

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
            return self._push(piece, said)
        parts = [piece] if MARKUP.fullmatch(piece) else piece
        for at, part in enumerate(parts):
            if not (self._wait or self._within):
                return self._push("".join(parts[at:]), said)
            self._wait += part
            least = max(_LEAST, len(self._block) // _SHARE)
            if len(self._wait) >= least or (least == _LEAST and part in _CLOSING):
                self._flush(said)
        return None

    @property
    def _within(self) -> bool:
        """Whether what comes is not simply text."""
        return self._cut or self._began(self._taken) or self._lists

    @property
    def _lists(self) -> bool:
        """Whether the block is calls in brackets, which are no marks, and has a whole one."""
        listed = bool(self._close) and self._close not in self.marks and self._open in self._block
        return listed and len(self.calls) > self._first and not self._cut

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
            if self._lists:
                self._list(piece, said)
        elif text.strip() and self._began(before):
            self._raw = piece != self._close  # the parser gave up what it had taken for a call
            return self._give_up(said)
        elif self._lists:
            self._list(piece, said)
        elif text and (text.strip() or not before):
            self._shown(self._whole(text), said)
        self._without_arguments(said)
        if piece == self._close:
            if piece in self.marks:
                self._closed(said)
            elif self._one and self.calls and not self._cut:
                self.full = True  # a bracket behind the call
        return None

    def _list(self, piece: str, said: Said) -> None:
        """Behind a call in brackets, where a parser may take further ones for text: wait for the end of the list."""
        self.full |= self._one and bool(self._taken.strip())
        if self.full or self._close not in piece:
            return
        begin = self._block.index(self._open) + len(self._open) - 1
        try:
            found, end = json.JSONDecoder().raw_decode(self._block, begin)
        except (ValueError, RecursionError):
            return
        self._look_back(said)
        if len(found) > len(self.calls) - self._first:
            return self._give_up(said)  # it calls what there is not
        rest = self._block[end:]
        self._renew()
        self._text(rest, said)

    def _whole(self, text: str) -> str:
        """What was taken, where the text is that without the brackets that a parser takes for marks."""
        if not self._close or self._close in self.marks:
            return text
        return self._taken if text.strip() == self._taken.replace(self._close, "").strip() else text

    def _without_arguments(self, said: Said) -> None:
        """The calls that the parser has left behind, of which it said no more than the names."""
        for number, index in self._numbers.items():
            if number < self._parser.left and not self.calls[index].arguments:
                self._add(index, self.calls[index], "{}", said)

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

    @property
    def _bare(self) -> str:
        """What was taken, without marks."""
        taken = self._taken.replace(self._close, "") if self._close in self.marks else self._taken
        return _MARKS.sub("", taken).strip()

    def _closed(self, said: Said) -> None:
        """A block of calls ended, unless the mark is a part of an argument."""
        if self._cut or self._began(self._taken):
            self._look_back(said)
        if self._began(self._taken) or (len(self.calls) == self._first and self._bare):
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
            # Marks by themselves, and what closes a call, are the format's.
            if len(self.calls) > self._first:
                self._text(self._bare if self._bare.strip(_CLOSING) else "", said)
            else:
                self._text(self._taken if self._bare else "", said)
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
        if arguments and not call.whole:
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
