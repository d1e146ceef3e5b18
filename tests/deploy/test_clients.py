"""The clients of a bring-up see every way in which an answer can fail, and go on asking."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.conftest import eventually
from tests.deploy.clients import Clients

WHOLE = {
    False: json.dumps({"choices": [{"message": {"content": "ab"}}]}),
    True: "".join(f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n" for text in "ab")
    + "data: [DONE]\n\n",
}
CUT = WHOLE[True].replace("data: [DONE]\n\n", "")


def ends(failure: tuple[int, str]) -> dict[str, int]:
    """How answers end of which the fifth is `failure`."""
    asked = iter(range(10**6))

    def ask(said: str, **fields: Any) -> tuple[int, str]:
        time.sleep(0.002)
        return failure if next(asked) == 4 else (200, WHOLE[fields["stream"]])

    with Clients(ask, "q") as clients:
        eventually(lambda: min(clients.ends["stream"], clients.ends["answer"]) > 5, 60)
    return clients.ends


@pytest.mark.parametrize("failure", [
    (0, ""), (503, "{}"), (200, ""), (200, "not JSON"), (200, CUT), (200, WHOLE[True].replace('"b"', '"c"')),
    (200, 'data: {"error": {}}\n\ndata: [DONE]\n\n'), (200, json.dumps({"choices": []})),
])  # fmt: skip
def test_a_failure_is_counted_and_no_client_stops_asking(failure: tuple[int, str]) -> None:
    found = ends(failure)
    assert sum(count for kind, count in found.items() if kind not in ("stream", "answer")) == 1


def test_without_an_answer_at_first_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(AssertionError, match="503"):
        Clients(lambda said, **fields: (503, "no"), "q")
