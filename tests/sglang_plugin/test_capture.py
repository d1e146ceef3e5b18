"""What a capture took arrives in the metrics, whatever the capture did."""

from typing import Any

import pytest

from serve_app.sglang_plugin import metrics
from serve_app.sglang_plugin.graph import measured_capture


def test_time_and_memory_of_a_capture_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metrics, "graph_capture", lambda *said: told.append(said))
    ran: list[bool] = []
    measured_capture("target", 4, lambda: ran.append(True))
    ((role, graphs, seconds, reserved),) = told
    assert ran == [True] and (role, graphs) == ("target", 4)
    assert seconds >= 0 and reserved >= 0


def test_a_capture_that_fails_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "graph_capture", lambda *said: pytest.fail("told"))

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        measured_capture("target", 4, fail)
