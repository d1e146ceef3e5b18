"""One answer as its reader sees it: lines of an event stream with their arrival times → an `Outcome`.

Failures are found here and not left to the HTTP client: a stream that ends cleanly but early looks like success to
every client library.

What this module does not do: read sockets or clocks; both are handed in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"


@dataclass
class Outcome:
    """What became of one request. Times are seconds after it was sent, `started` is on the run's clock.

    Attributes:
        workload: its class of work. users: the load when it began (users, or requests in flight of an open loop).
        late_s: how long after its planned time it was sent (open loop).
        connect_s: making a connection for it before that; None where one was there.
        status: of HTTP; 0 without an answer. request_id: the server's.
        failure: why it counts as failed, None for success. abandoned: the client left on purpose.
        retry_after_s: how long the server asked to be left alone after it; 0 where it did not.
        ttft_s: until the first content or reasoning. last_s: until the last choice frame. end_s: until the last byte.
        frames: events with a choice, one per step of the engine. gaps: seconds between frames with content.
        prompt_tokens, completion_tokens: the server's usage, None where there was none.
    """

    workload: str
    started: float
    users: int = 0
    late_s: float = 0.0
    connect_s: float | None = None
    status: int = 0
    request_id: str = ""
    stream: bool = True
    failure: str | None = None
    abandoned: bool = False
    retry_after_s: float = 0.0
    ttft_s: float | None = None
    last_s: float | None = None
    end_s: float = 0.0
    frames: int = 0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        """Completed and measured; an abandoned answer is neither success nor failure."""
        return self.failure is None and not self.abandoned

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, over the server's count of tokens."""
        if self.ttft_s is None or self.last_s is None or not self.completion_tokens or self.completion_tokens < 2:
            return None
        return (self.last_s - self.ttft_s) / (self.completion_tokens - 1)

    @property
    def tokens_per_frame(self) -> float | None:
        """Acceptance length as the client sees it. The first frame is the prefill's single token."""
        if not self.stream or not self.completion_tokens or self.frames < 2:
            return None
        return (self.completion_tokens - 1) / (self.frames - 1)

    def take_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.prompt_tokens, self.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")


class StreamReader:
    """Feeds the lines of a stream into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._parts: list[str] = []
        self._content_at: float | None = None
        self.done = False

    def line(self, raw: bytes, at: float) -> bool:
        """One line, its end included. True when the stream is over, by `[DONE]` or by an error of its own."""
        line = raw.strip()
        if not line.startswith(b"data:"):
            return False  # a comment, another field, or the empty line between events
        payload = line[5:].strip()
        if payload == DONE:
            self.done = True
            return True
        try:
            event = json.loads(payload)
        except ValueError:
            return self._fail("bad_event")
        if not isinstance(event, dict):
            return self._fail("bad_event")
        if "error" in event:
            error = event["error"]
            code = error.get("code") or error.get("type") if isinstance(error, dict) else None
            return self._fail(f"error_frame:{code or 'unnamed'}")
        self._outcome.take_usage(event.get("usage"))
        for choice in event.get("choices") or ():
            self._choice(choice, at)
        return False

    def _fail(self, kind: str) -> bool:
        self._outcome.failure = self._outcome.failure or kind
        return True

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        outcome = self._outcome
        outcome.frames += 1
        outcome.last_s = at
        delta = choice.get("delta") or {}
        content = delta.get("content") or choice.get("text") or ""
        if not (content or delta.get("reasoning_content") or delta.get("reasoning")):
            return
        self._parts.append(content)
        if self._content_at is None:
            outcome.ttft_s = at
        else:
            outcome.gaps.append(at - self._content_at)
        self._content_at = at

    def finish(self, at: float) -> None:
        """The connection has no more to say. Decides whether the answer was one."""
        outcome = self._outcome
        outcome.end_s, outcome.text = at, "".join(self._parts)
        if outcome.failure is not None or outcome.abandoned:
            return
        if not self.done:
            # Without a finished choice or not: the client cannot tell a whole answer from half of one.
            outcome.failure = "cut" if outcome.completion_tokens is None else "no_done"
        elif outcome.completion_tokens is None:
            outcome.failure = "no_usage"
        elif outcome.ttft_s is None:
            outcome.failure = "empty"


def read_whole(outcome: Outcome, body: bytes, at: float) -> None:
    """An answer that does not stream."""
    outcome.end_s = at
    try:
        answer = json.loads(body)
        message = answer["choices"][0].get("message") or {}
        outcome.text = message.get("content") or answer["choices"][0].get("text") or ""
        outcome.take_usage(answer.get("usage"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        outcome.failure = "bad_body"
        return
    if outcome.completion_tokens is None:
        outcome.failure = "no_usage"
    elif not outcome.text:
        outcome.failure = "empty"


def refused(outcome: Outcome, body: bytes, at: float, retry_after: str = "") -> None:
    """An answer whose status is not 200: failed, by its status and the error's code. `retry_after`: the header, of
    which a date says nothing here."""
    outcome.end_s = at
    outcome.retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
    code = None
    try:
        error = json.loads(body).get("error")
        code = error.get("code") or error.get("type")
    except (ValueError, AttributeError):
        pass
    outcome.failure = f"status_{outcome.status}:{code or 'not_openai'}"
