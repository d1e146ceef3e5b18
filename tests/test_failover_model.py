"""The embedded engine's answers, when the replica that writes them is killed: the text of an undisturbed run."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conftest import METRICS, Served, eventually, full_only, metric, replica_pids, samples

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
MODEL = "smollm2-135m"
TOKENS = 140


@pytest.fixture(scope="module")
def pair(serve_app_factory: Callable[..., Served]) -> Served:
    # float32, where a prefill and a step over the same tokens agree on the likeliest next one.
    config = {
        "model": {"dtype": "float32"},
        "engine": {"max_running": 2},
        "replica": {"num_replicas": 2, "num_cpus": 0.1},
        "metrics": METRICS,
    }
    return serve_app_factory("pair", config)


def stream(served: Served, body: dict[str, Any], on_event: Callable[[int], None]) -> tuple[str, list[Any], Any, str]:
    """Text, log-probability entries, usage and finish reason; `on_event` is told of each event."""
    text, entries, usage, reason = "", list[Any](), None, ""
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=200, trust_env=False) as answer:
        lines = list(_events(answer, on_event))
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        event = json.loads(line)
        assert "error" not in event
        usage = event["usage"] or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content", "")
            entries += (choice["logprobs"] or {}).get("content", [])
            reason = choice["finish_reason"] or reason
    return text, [(e["token"], round(e["logprob"], 2)) for e in entries], usage, reason


def _events(answer: httpx.Response, on_event: Callable[[int], None]) -> Any:
    count = 0
    for line in answer.iter_lines():
        if line:
            on_event(count)
            count += 1
            yield line.removeprefix("data: ")


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, pytest.param({"temperature": 0.7, "seed": 11}, marks=full_only)],
    ids=["greedy", "seeded"],
)
def test_the_text_is_that_of_an_undisturbed_run(pair: Served, sampling: dict[str, Any]) -> None:
    eventually(lambda: len(replica_pids("pair", "engine")) == 2, 120)
    question = [{"role": "user", "content": "Explain to a child, with emoji, why the sky is blue."}]
    body = {
        "model": MODEL, "messages": question, "max_tokens": TOKENS, "stream": True, "logprobs": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, **sampling,
    }  # fmt: skip
    undisturbed = stream(pair, body, lambda _: None)
    killed: list[int] = []

    def kill(event: int) -> None:
        if event != 6:
            return
        pids = replica_pids("pair", "engine")
        # A probe of the idle one runs for a moment, with next to nothing.
        held = {s.labels["replica"]: s.value for s in samples(pair) if s.name == "ddtree_kv_tokens_used"}
        busy = max(held, key=lambda name: held[name])
        assert held[busy] > 1
        os.kill(pids[busy], signal.SIGKILL)
        killed.append(pids[busy])

    before = metric(pair, "gateway_resumes_total", outcome="resumed")
    assert stream(pair, body, kill) == undisturbed
    assert len(killed) == 1 and metric(pair, "gateway_resumes_total", outcome="resumed") == before + 1
