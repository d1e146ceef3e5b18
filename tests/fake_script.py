"""What a fake engine is told to do, in the words of the prompt itself.

Words `key=value` steer, the others are the answer, one token each. `repeat=N` says it N times; `delay=S` waits before
each token, `stall=S` before the first; `fail_at=N` raises at token N, `crash_at=N` ends the process, `die_at=N` too
unless another replica emitted tokens before, `abort_at=N` ends as aborted; `bytes=HEX` answers one byte a token;
`refuse=CLASS` raises that error; `dead=1`/`stuck=1` break health; `gone_at=N` ends the engine before token N.
`hold=PATH` keeps token N back until that file has more than N bytes (`tests.conftest.Hold`).
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from serve_app import errors
from serve_app.engines.base import TokenLogprob


class Script:
    def __init__(self, text: str, max_tokens: int, emitted: tuple[int, ...] = ()) -> None:
        words = text.split()
        self.prompt_tokens = len(words)
        self.settings = dict(word.split("=", 1) for word in words if "=" in word)
        said = [word for word in words if "=" not in word] * int(self.settings.get("repeat", 1)) or ["ok"]
        tokens = [word.encode() if i == 0 else b" " + word.encode() for i, word in enumerate(said)]
        if "bytes" in self.settings:
            tokens = [bytes([byte]) for byte in bytes.fromhex(self.settings["bytes"])]
        self.tokens = tokens[:max_tokens]
        self.end = "stop" if len(self.tokens) == len(tokens) else "length"
        self.fresh = not emitted
        if emitted != tuple(token[0] for token in self.tokens[: len(emitted)]) or len(emitted) >= len(self.tokens):
            raise ValueError("these tokens do not belong to this script")

    def check(self) -> None:
        if "refuse" in self.settings:
            raise getattr(errors, self.settings["refuse"])("Refused by the script.")

    async def before(self, index: int) -> None:
        """Whatever happens before a token."""
        while "hold" in self.settings and _size(Path(self.settings["hold"])) <= index:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self._number("delay") + (self._number("stall") if index == 0 else 0))
        if index == self._number("fail_at", -1):
            raise RuntimeError("secret details of the engine")
        if self.fresh and index == self._number("gone_at", -1):
            raise errors.ReplicaLost("The fake engine died.", retry_after=1)
        if index == self._number("crash_at", -1) or (self.fresh and index == self._number("die_at", -1)):
            os._exit(1)

    def reason(self, index: int) -> Any:
        if index == self._number("abort_at", -1):
            return "abort"
        return self.end if index == len(self.tokens) - 1 else None

    def logprobs(self, index: int, wanted: int | None) -> tuple[TokenLogprob, ...] | None:
        raw = self.tokens[index]
        plain = (raw[0], raw.decode("utf-8", "replace"), tuple(raw), -0.5)
        top = tuple(TokenLogprob(*plain) for _ in range(wanted or 0))
        return None if wanted is None else (TokenLogprob(*plain, top),)

    def _number(self, key: str, default: float = 0) -> float:
        return float(self.settings.get(key, default))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
