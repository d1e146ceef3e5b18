"""Clients that keep asking while something changes, and how their answers ended."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any, Protocol


class Ask(Protocol):
    """A chat request: what is said, and fields of the body. Status and body of the answer; status 0 for none."""

    def __call__(self, said: str, **fields: Any) -> tuple[int, str]: ...


class Clients:
    """They ask one question again and again, some for streams, until the block ends; `ends` counts how they ended."""

    def __init__(self, ask: Ask, question: str) -> None:
        self._ask, self._question, self._over = ask, question, threading.Event()
        self.ends: Counter[str] = Counter()
        whole, self._text = self._one(stream=False)
        assert whole and self._text, self._text
        self._threads = [threading.Thread(target=self._run, args=(stream,)) for stream in (True, True, False)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, stream: bool) -> None:
        kind = "stream" if stream else "answer"
        while not self._over.is_set():
            ended = self._one(stream)
            self.ends[kind if ended == (True, self._text) else f"{kind}: {ended[1]}"] += 1

    def _one(self, stream: bool) -> tuple[bool, str]:
        """Whether an answer is whole, and its text; or what there is instead of one."""
        status, body = self._ask(self._question, max_tokens=32, stream=stream)
        try:
            return (True, text_of(body, stream)) if status == 200 else (False, f"{status} {body[-300:]}")
        except (ValueError, KeyError, IndexError, TypeError):
            return False, body[-300:]


def text_of(body: str, stream: bool) -> str:
    """What an answer says; an error of Python's where it is none, or ends otherwise than with [DONE]."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    *events, last = [line.removeprefix("data: ") for line in body.split("\n") if line]
    if last != "[DONE]":
        raise ValueError(last)
    # A frame with an error has no choices.
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
