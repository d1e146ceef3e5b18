"""What goes wrong on purpose: bodies that must be refused, and an engine replica that dies.

What this module does not do: kill anything that it is not given by process id.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
JSON = "application/json"
TOO_LARGE = 413


def invalid_bodies(model: str) -> list[tuple[bytes, str, int]]:
    """(body, content type, the status it must get), all for chat completions."""
    good: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    def wrong(**fields: Any) -> bytes:
        return json.dumps({**good, **fields}).encode()

    return [
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"\xff\xfe{}", JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (wrong(model="no-such-model"), JSON, 404),
        (wrong(messages=[]), JSON, 400),
        (wrong(messages="hi"), JSON, 400),
        (wrong(max_tokens=-1), JSON, 400),
        (wrong(max_tokens=10**9), JSON, 400),
        (wrong(temperature="hot"), JSON, 400),
        (wrong(unheard_of=1), JSON, 400),
        (wrong(n=10**6), JSON, 400),
        (wrong(logit_bias={"99999999": 1}), JSON, 400),
        (wrong(min_tokens=5), JSON, 400),
        (wrong(messages=[{"role": "user", "content": "word " * 40_000}]), JSON, 400),
        (wrong(), "text/plain", 415),
        (b" " * (4 * 1024 * 1024), JSON, TOO_LARGE),
    ]


class Vandal:
    """Sends one invalid body after another. `got`: answers by status; `wrong`: those that were no right refusal."""

    def __init__(self, base: str, model: str) -> None:
        self._url = f"{base}/v1/chat/completions"
        self._bodies: Iterator[tuple[bytes, str, int]] = cycle(invalid_bodies(model))
        self.got: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, pause: Callable[[], Any], going: Callable[[], bool]) -> None:
        """Until `going` says no, with a `pause` between bodies."""
        while going():
            body, kind, expected = next(self._bodies)
            request = urllib.request.Request(self._url, data=body, headers={"Content-Type": kind})
            try:
                with _DIRECT.open(request, timeout=60) as answer:
                    status = int(answer.status)
            except urllib.error.HTTPError as refusal:
                status = refusal.code
                refusal.close()
            except OSError as error:
                if expected == TOO_LARGE:
                    # A server may hang up on a body that it will not read. Whether it counted is for the books.
                    self.got[str(expected)] += 1
                    continue
                self.wrong.append(f"{body[:40]!r} got {type(error).__name__}, not {expected}")
                continue
            self.got[str(status)] += 1
            if status != expected:
                self.wrong.append(f"{body[:40]!r} got {status}, not {expected}")
            pause()


def kill(pid: int) -> None:
    """As the kernel does to a process that took too much memory."""
    os.kill(pid, signal.SIGKILL)
