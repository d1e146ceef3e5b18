"""The whole application over a real SGLang on a CPU, where Ray and SGLang are in one environment: HTTP to tokens, tools
with the official client, the death of SGLang's scheduler in mid-answer, and its series on the application's page."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from deploy.gpu_e2e import checks
from deploy.gpu_e2e.template import PARSER, with_tools
from serve_app.models import resolve
from tests.conftest import METRICS, Served, eventually
from tests.engines.sglang.conftest import KERNELS, ON_A_CPU

missing = [name for name in ("sglang", "ray") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing), reason=f"not installed beside each other: {missing}"),
]
MODEL = "smollm2-135m"
TOKENS = 120
START_S = 300


@pytest.fixture(scope="module")
def served(
    sglang_on_cpu: None, serve_app_factory: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory
) -> Served:
    source = with_tools(resolve(MODEL).path, tmp_path_factory.mktemp("model"))
    arguments = {**ON_A_CPU, "max_total_tokens": 8192, "constrained_json_disable_any_whitespace": True}
    config = {
        "model": {
            "source": str(source), "dtype": "float32", "device": "cpu", "drafter": None, "context_length": 2048,
        },
        "engine": {"kind": "sglang", "max_running": 4},
        "sglang": {"attention_backend": "torch_native", "tool_call_parser": PARSER, "server_args": arguments},
        "replica": {"num_cpus": 0.1},
        "metrics": METRICS,
    }  # fmt: skip
    return serve_app_factory("sglang", config)


@pytest.fixture(scope="session", autouse=True)
def _kernel_for_ray() -> Iterator[None]:
    """Ray's processes inherit the environment, not this one's path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(KERNELS))))
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def ask(served: Served, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name the days of the week."}], **fields}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=START_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(served: Served, on_event: Callable[[int], None], **fields: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name the days of the week."}], **fields}
    url, text = f"{served.url}/v1/chat/completions", ""
    options: dict[str, Any] = {"json": {**body, "stream": True}, "timeout": START_S, "trust_env": False}
    with httpx.stream("POST", url, **options) as answer:
        for count, line in enumerate(line for line in answer.iter_lines() if line):
            on_event(count)
            event = line.removeprefix("data: ")
            if event != "[DONE]":
                assert "error" not in json.loads(event), event
                text += json.loads(event)["choices"][0]["delta"].get("content") or ""
    return text


def schedulers() -> list[Any]:
    import psutil

    return [process for process in psutil.process_iter(["cmdline"]) if _is_ours(process)]


def _is_ours(process: Any) -> bool:
    """A scheduler below this test's own Ray."""
    import psutil

    try:
        mine = psutil.Process().pid in [parent.pid for parent in process.parents()]
        return mine and "sglang::scheduler" in " ".join(process.info["cmdline"] or ())
    except psutil.Error:
        return False


def test_it_answers_a_question(served: Served) -> None:
    answer = ask(served, temperature=0, max_tokens=60)
    assert "Monday" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] > 10


def test_an_answer_follows_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"days": {"type": "integer"}},
        "required": ["days"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "days", "schema": schema}}
    answer = ask(served, response_format=wanted, max_tokens=200, temperature=0)
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["days"], int)


def test_a_field_that_sglang_cannot_honour_is_named(served: Served) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "seed": 1}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")


@pytest.mark.parametrize(
    "check",
    [
        checks.a_tool_that_must_be_called_is,
        checks.a_call_streams,
        checks.a_tool_may_be_called,
        checks.a_tool_gives_its_answer,
        checks.wrong_tools_are_named,
    ],
)
def test_tools_are_what_the_official_client_expects(
    official: openai.OpenAI, check: Callable[[openai.OpenAI], None]
) -> None:
    check(official)


def test_the_page_has_sglangs_series(served: Served) -> None:
    ask(served, temperature=0, max_tokens=3)

    def series() -> bool:
        page = httpx.get(f"{served.url}/metrics", timeout=60, trust_env=False).text
        return all(f"{name}{{" in page for name in ("sglang:num_running_reqs", "ddtree_request_slots"))

    eventually(series)


def test_an_answer_survives_the_death_of_sglangs_scheduler(served: Served) -> None:
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    whole = stream(served, lambda count: None, **sampling)

    def kill(count: int) -> None:
        if count == TOKENS // 4:
            (scheduler,) = schedulers()
            os.kill(scheduler.pid, signal.SIGKILL)

    assert stream(served, kill, **sampling) == whole
