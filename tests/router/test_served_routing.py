"""Affinity on real Serve: two ingresses, two replicas."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.conftest import Hold, Served, eventually, samples

SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 20}


def submits(served: Served) -> dict[str, float]:
    """Requests that each of the two replicas got so far."""
    return {s.labels["replica"]: s.value for s in samples(served) if s.name == "fake_submits_total"}


def ask(served: Served, messages: list[dict[str, str]], **headers: str) -> str:
    body: dict[str, Any] = {"model": "fake", "messages": messages}
    # A connection of its own, so that any ingress may get it.
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


def grown(served: Served, before: dict[str, float]) -> list[float]:
    return sorted(value - before[name] for name, value in submits(served).items())


def test_the_turns_of_a_chat_stay_on_one_replica(served: Served) -> None:
    before = submits(served)
    messages = [SYSTEM]
    for turn in range(8):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append({"role": "assistant", "content": ask(served, messages)})
    assert grown(served, before) == [0, 8]


def test_a_session_stays_on_one_replica_whatever_it_says(served: Served) -> None:
    before = submits(served)
    for number in range(8):
        ask(served, [{"role": "user", "content": f"{number} unrelated"}], **{"x-session-id": "s-42"})
    assert grown(served, before) == [0, 8]


def test_under_load_a_shared_system_prompt_does_not_crowd_one_replica(served: Served, hold: Hold) -> None:
    """The last of this file: a router learns a moment later than the clients that answers have ended."""
    before = submits(served)
    with ThreadPoolExecutor(24) as pool:
        chats = [[SYSTEM, {"role": "user", "content": f"chat {number} {hold}"}] for number in range(24)]
        asked = [pool.submit(ask, served, messages) for messages in chats]
        try:
            # None has ended before the last has begun.
            eventually(lambda: sum(grown(served, before)) == 24)
        finally:
            hold.release()
        for one in asked:
            one.result()
    # Each of two ingresses gives a replica half as many again as the mean at most, or three more.
    assert grown(served, before)[0] >= 3
