"""Locust users: a closed loop of people who wait for their answers, and the dispatcher of an open loop.

Locust times a streamed request until its headers and counts an exception in a task as nothing at all; here the time is
that of the last byte, by the kernel's clock (see `stamps`), and whatever goes wrong ends as a failure of that request.

What this module does not do: decide what is asked, or whether an answer is whole (see `workloads`, `timeline`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import gevent
from gevent.pool import Group
from locust import FastHttpUser, constant, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.exception import StopUser

from load_tests.recorder import Load
from load_tests.stamps import CURRENT, Stamps, TimedClients
from load_tests.timeline import Outcome, StreamReader, read_whole, refused
from load_tests.workloads import Ask

PATH = "/v1/chat/completions"
MAX_IN_FLIGHT = 4096
# How often one who waits looks whether the run is over.
_LOOK_S = 0.2
# Locust counts its own time limit among the errors of a connection; here it is told apart.
BROKEN = tuple(kind for kind in FAILURE_EXCEPTIONS if not issubclass(kind, gevent.Timeout))


class _Client(FastHttpUser):
    """`environment.load` is the run's `Load`."""

    abstract = True
    network_timeout = connection_timeout = 600.0  # the run's own limit is shorter, and is told apart

    def __init__(self, environment: Any) -> None:
        limits = {"network_timeout": self.network_timeout, "connection_timeout": self.connection_timeout}
        self.client_pool = TimedClients(concurrency=self.concurrency, **limits)
        super().__init__(environment)

    def on_start(self) -> None:
        self.load: Load = self.environment.load
        # A redirect could lead off this machine.
        self.client.client.redirect_response_codes = frozenset()

    def ask(
        self, ask: Ask, messages: list[dict[str, str]] | None = None, *, users: int, due: float | None = None
    ) -> Outcome:
        """Send one request and read its answer. `due`: when it should be sent. Never raises but for the end of this
        greenlet."""
        recorder = self.load.recorder
        data = json.dumps(ask.body(self.load.model, messages)).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **ask.headers}
        if self.load.api_key:
            headers["Authorization"] = f"Bearer {self.load.api_key}"
        outcome = Outcome(ask.workload, recorder.now(), users=users, stream=ask.stream)
        recorder.opened()
        begin, stamps = time.perf_counter(), Stamps()
        CURRENT.set(stamps)
        try:
            with gevent.Timeout(self.load.request_timeout_s):
                self._exchange(ask, data, headers, outcome, stamps)
        except gevent.Timeout:
            outcome.failure = "timeout"
        except gevent.GreenletExit:
            outcome.failure = "unfinished"
            raise
        except Exception as error:
            outcome.failure = f"client:{type(error).__name__}"
        finally:
            sent = stamps.sent if stamps.sent is not None else begin
            outcome.end_s = outcome.end_s or time.perf_counter() - sent
            outcome.started, outcome.connect_s = recorder.at(sent), stamps.connect_s
            outcome.late_s = 0.0 if due is None else max(0.0, outcome.started - due)
            recorder.closed(outcome)
            self._tell_locust(outcome)
        return outcome

    def _exchange(self, ask: Ask, data: bytes, headers: Mapping[str, str], outcome: Outcome, stamps: Stamps) -> None:
        sent: dict[str, Any] = {"data": data, "headers": dict(headers), "name": ask.workload}
        with self.client.post(PATH, **sent, stream=True, catch_response=True) as response:
            outcome.status = response.status_code
            outcome.request_id = str((response.headers or {}).get("x-request-id", ""))
            try:
                self._read(ask, response, outcome, stamps)
            except BROKEN:
                outcome.failure = outcome.failure or "cut"
            response.request_meta["response_time"] = 1e3 * (outcome.end_s or _so_far(stamps))
            if outcome.failure is None:
                response.success()
            else:
                response.failure(outcome.failure)

    def _read(self, ask: Ask, response: Any, outcome: Outcome, stamps: Stamps) -> None:
        if not outcome.status:
            error = response.error
            outcome.failure = "timeout" if isinstance(error, gevent.Timeout) else f"connection:{type(error).__name__}"
        elif outcome.status != 200:
            retry_after = str((response.headers or {}).get("retry-after", ""))
            refused(outcome, bytes(response.content or b""), _so_far(stamps), retry_after)
        elif not ask.stream:
            read_whole(outcome, bytes(response.content), _so_far(stamps))
        else:
            try:
                self._read_stream(ask, response.stream, outcome, stamps)
            finally:
                response.stream.release()  # closes the connection unless it was read to its end

    def _read_stream(self, ask: Ask, source: Any, outcome: Outcome, stamps: Stamps) -> None:
        reader = StreamReader(outcome)
        try:
            # Events end with \n; the client's default separator, \r\n, would find none.
            while line := source.readline(b"\n"):
                if reader.line(line, _so_far(stamps)):
                    break
                if ask.abandon_after is not None and outcome.frames >= ask.abandon_after:
                    outcome.abandoned = True
                    break
            if reader.done:
                source.read()  # the end of the chunked body, so that the connection can serve again
        except BROKEN:
            pass  # `finish` sees that the end is missing
        reader.finish(_so_far(stamps))

    def _tell_locust(self, outcome: Outcome) -> None:
        """Rows of Locust's own statistics beside the request itself."""
        fire = self.environment.events.request.fire
        for kind, value in (("TTFT", outcome.ttft_s), ("TPOT", outcome.tpot_s)):
            if value is not None and outcome.ok:
                fire(
                    request_type=kind, name=outcome.workload, response_time=1e3 * value, response_length=0,
                    exception=None, context={},
                )  # fmt: skip


def _so_far(stamps: Stamps) -> float:
    """Seconds from the first byte that was sent to the last that came."""
    if stamps.sent is None or stamps.received is None:
        return 0.0
    return stamps.received - stamps.sent


class LoadUser(_Client):
    """Asks, reads, asks again; after a refusal not before the time that the server named."""

    wait_time = constant(0)

    @task
    def converse(self) -> None:
        ask = self.load.next_ask()
        if ask is None:
            raise StopUser
        messages = list(ask.messages)
        for follow_up in (*ask.follow_ups, None):
            outcome = self.ask(ask, messages, users=self.environment.runner.target_user_count)
            if outcome.retry_after_s:
                self._wait(outcome.retry_after_s)
            if follow_up is None or outcome.failure is not None or self.load.stopping:
                return
            said = {"role": "assistant", "content": outcome.text}
            messages += [said, {"role": "user", "content": follow_up}]
            gevent.sleep(ask.think_s)

    def _wait(self, seconds: float) -> None:
        """Ends with the run, too."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0 and not self.load.stopping:
            gevent.sleep(min(left, _LOOK_S))


class Dispatcher(_Client):
    """Sends requests at given times, however many are still unanswered. `environment.arrivals`: (time, ask)."""

    concurrency = MAX_IN_FLIGHT
    wait_time = constant(0)

    @task
    def dispatch(self) -> None:
        recorder, group = self.load.recorder, Group()
        arrivals: Iterable[tuple[float, Ask]] = self.environment.arrivals
        for at, ask in arrivals:
            gevent.sleep(max(0.0, at - recorder.now()))
            if self.load.stopping:
                break
            if recorder.in_flight >= MAX_IN_FLIGHT:
                recorder.opened()
                recorder.closed(Outcome(ask.workload, recorder.now(), failure="unsent"))
                continue
            group.spawn(self.ask, ask, users=recorder.in_flight, due=at)
        group.join()
        raise StopUser
