"""Who may ask, how much, and in which order. Off until `admission` configures it.

Limits are those of the deployment; each ingress process enforces its share, a fraction of every rate and a rounded-up
fraction of every count.

What this package does not do: HTTP, or bounds on one request (see `protocol` and `ingress.limits`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from serve_app.admission.keys import KeyRing
from serve_app.admission.limits import PRIORITIES, Gate, Priority, TokenBucket
from serve_app.config import AdmissionConfig, ApiKey
from serve_app.errors import AuthenticationFailed, InvalidRequest, RateLimited
from serve_app.metrics import GatewayMetrics

__all__ = ["ANONYMOUS", "BYTES_PER_TOKEN", "PRIORITY_HEADER", "Admission", "Caller", "Priority"]
PRIORITY_HEADER = "x-priority"
# A request costs this many bytes of body per prompt token until its usage is known.
BYTES_PER_TOKEN = 4


@dataclass(eq=False)
class Caller:
    """A key and what it used. `models` is None for all of them."""

    name: str = "anonymous"
    models: frozenset[str] | None = None
    priority: Priority = "interactive"
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    max_concurrent: int | None = None
    running: int = 0

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def charge(self, tokens: float) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens)


ANONYMOUS = Caller()


class Admission:
    """One ingress process's part of admission.

    Args:
        processes: how many ingress processes share the limits. clock: for the rates.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        metrics: GatewayMetrics,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = KeyRing(config.keys)
        self._callers = {key.name: _caller(key, processes, clock) for key in config.keys}
        self._gate: Gate | None = None
        if config.max_concurrent is not None:
            self._gate = Gate(_part(config.max_concurrent, processes), math.ceil(config.max_queued / processes))
            for priority in PRIORITIES:
                metrics.waiting.labels(priority).set_function(partial(self._gate.waiting, priority))
        self._used = metrics.key_tokens
        for name in self._callers:
            for kind in ("prompt", "completion"):
                self._used.labels(name, kind)

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request. Anybody where no keys are configured. Raises AuthenticationFailed."""
        if not self._callers:
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise AuthenticationFailed("Send an API key as Authorization: Bearer KEY.")
        entry = await self._ring.find(key.strip())
        if entry is None:
            raise AuthenticationFailed("The API key is not known.")
        return self._callers[entry.name]

    def priority(self, caller: Caller, headers: Mapping[str, str]) -> Priority:
        """What the header asks for, which may be less than the key allows. Raises InvalidRequest."""
        wanted = headers.get(PRIORITY_HEADER, caller.priority)
        if wanted not in ("interactive", "batch"):
            raise InvalidRequest(f"{PRIORITY_HEADER} must be interactive or batch.", param=PRIORITY_HEADER)
        return "batch" if "batch" in (wanted, caller.priority) else "interactive"

    def count_request(self, caller: Caller) -> None:
        """Raises RateLimited where the key has used up its requests or its tokens."""
        waits = [bucket.wait_s(1) for bucket in (caller.requests, caller.tokens) if bucket is not None]
        if any(waits):
            raise RateLimited("This API key has used up its rate; try again later.", retry_after=max(waits))
        if caller.requests is not None:
            caller.requests.take(1)

    @contextlib.asynccontextmanager
    async def slot(self, caller: Caller, priority: Priority) -> AsyncIterator[None]:
        """Held while a request generates; waits for its turn. Raises RateLimited, Overloaded."""
        if caller.max_concurrent is not None and caller.running >= caller.max_concurrent:
            raise RateLimited("This API key has too many requests running.", code="concurrency_exceeded", retry_after=1)
        caller.running += 1
        try:
            if self._gate is None:
                yield
            else:
                async with self._gate.slot(priority):
                    yield
        finally:
            caller.running -= 1

    def used(self, caller: Caller, kind: str, tokens: int) -> None:
        """For the key's series; `kind` is prompt or completion."""
        if caller.name in self._callers:
            self._used.labels(caller.name, kind).inc(tokens)


def _caller(key: ApiKey, processes: int, clock: Callable[[], float]) -> Caller:
    def bucket(per_minute: float | None) -> TokenBucket | None:
        return None if per_minute is None else TokenBucket(per_minute / processes, clock)

    return Caller(
        name=key.name,
        models=None if key.models is None else frozenset(key.models),
        priority=key.priority,
        requests=bucket(key.requests_per_minute),
        tokens=bucket(key.tokens_per_minute),
        max_concurrent=None if key.max_concurrent is None else _part(key.max_concurrent, processes),
    )


def _part(count: int, processes: int) -> int:
    return max(1, math.ceil(count / processes))
