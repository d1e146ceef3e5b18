"""Where a text ends: stop strings, end tokens and the token limit, decided token by token.

A block of accepted tokens is fed one token at a time and ends at the first that stops it, so that nothing behind it
leaks, whatever else stops later in the same block.

What this module does not do: generate, or release slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from serve_app.engines.base import FinishReason, SamplingParams
from serve_app.engines.local.detokenizer import Detokenizer
from serve_app.errors import InvalidRequest


class StopStrings:
    """Releases text up to the first stop string, holding back what may still become one.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Add text. Returns what may be shown now, and the stop string that ended it (then nothing more follows).

        Args:
            armed: False ignores stop strings that are complete by now (before `min_tokens`).
        """
        self._held += text
        if armed:
            found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
            if found:
                at, stop = min(found, key=lambda pair: pair[0])
                return self._held[:at], stop
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """The held text: it did not become a stop string."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    # Candidates begin with the stop's first character; `str.find` skips the rest of a long text.
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


@dataclass(frozen=True)
class Ending:
    """Why a choice ended; `reason` "stop" or "length", `detail` the stop string or stop token id, None for EOS."""

    reason: FinishReason
    detail: str | int | None = None


class TextStream:
    """Text of one choice, and its end.

    Args:
        max_tokens: tokens after which it ends, already bounded by the context.
        end_tokens: the model's end tokens.
    """

    def __init__(
        self, params: SamplingParams, detokenizer: Detokenizer, max_tokens: int, end_tokens: Collection[int]
    ) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._strings = StopStrings(params.stop)
        self._max_tokens = max_tokens
        self._ends = frozenset() if params.ignore_eos else frozenset(end_tokens)
        self._stop_ids = frozenset(params.stop_token_ids)
        self.count = 0

    def resume(self, tokens: Sequence[int]) -> None:
        """As if these had been pushed and their text shown. Raises InvalidRequest where they already end the text."""
        if tokens and self.push(tokens)[2] is not None:
            raise InvalidRequest("the emitted tokens already end the text", param="emitted")

    def push(self, tokens: Sequence[int]) -> tuple[int, str, Ending | None]:
        """Feed emitted tokens; returns how many of them belong to the text, the text to show, and the end."""
        if self._cannot_end(tokens):
            self.count += len(tokens)
            return len(tokens), self._detokenizer.push_all(tokens), None
        return self.push_each(tokens)

    def _cannot_end(self, tokens: Sequence[int]) -> bool:
        """Whether none of them can end the text or be held back, so that they need not be looked at one by one."""
        return (
            not self._params.stop
            and self.count + len(tokens) < self._max_tokens
            and self._ends.isdisjoint(tokens)
            and self._stop_ids.isdisjoint(tokens)
        )

    def push_each(self, tokens: Sequence[int]) -> tuple[int, str, Ending | None]:
        """`push`, token by token."""
        shown = []
        for used, token in enumerate(tokens, 1):
            text, ending = self._one(token)
            shown.append(text)
            if ending is not None:
                return used, "".join(shown), ending
        return len(tokens), "".join(shown), None

    def _one(self, token: int) -> tuple[str, Ending | None]:
        self.count += 1
        minimum = self._params.min_tokens
        if self.count > minimum and (token in self._ends or token in self._stop_ids):
            return self.finish(), Ending("stop", None if token in self._ends else token)
        text, stop = self._strings.push(self._detokenizer.push(token), armed=self.count >= minimum)
        if stop is not None:
            return text, Ending("stop", stop)
        if self.count >= self._max_tokens:
            return text + self.finish(), Ending("length")
        return text, None

    def finish(self) -> str:
        """Text still held when the choice ends; bytes flushed now may complete a stop string no more."""
        return self._strings.push(self._detokenizer.flush(), armed=False)[0] + self._strings.flush()
