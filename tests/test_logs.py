"""What the logs hold: a request's id and outcome, and no prompt unless asked for."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import FAKE_ENGINE, Served, chat, eventually
from tests.direct import direct_client, make_gateway

CHAT = "/v1/chat/completions"
SECRET = "confidential"
BODIES = [
    chat(SECRET),
    chat(f"{SECRET} fail_at=0"),
    chat(f"{SECRET} b fail_at=1", stream=True),
    chat(f"{SECRET} refuse=Overloaded"),
    chat(SECRET, n=0),
    chat(SECRET, max_tokens=SECRET),
    {**chat(SECRET), "messages": SECRET},
    {"model": "fake", "prompt": [SECRET, 1]},
]


def written(caplog: pytest.LogCaptureFixture) -> str:
    formatter = logging.Formatter("%(message)s")
    return "\n".join(f"{formatter.format(record)} {vars(record)}" for record in caplog.records)


async def post(caplog: pytest.LogCaptureFixture, body: Any, **config: Any) -> str:
    caplog.set_level(logging.DEBUG)
    async with direct_client(await make_gateway(config)) as client:
        for path in (CHAT, "/v1/completions", "/tokenize"):
            await client.post(path, json=body, headers={"x-request-id": "mine"})
    return written(caplog)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_no_line_holds_a_prompt(caplog: pytest.LogCaptureFixture, body: Any) -> None:
    log = await post(caplog, body)
    assert "mine" in log and SECRET not in log


async def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert SECRET in await post(caplog, chat(SECRET), logging={"prompts": True})


async def test_a_failure_in_the_engine_is_found_by_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    await post(caplog, chat("a fail_at=0"))
    (record,) = [record for record in caplog.records if "engine failed" in record.message]
    assert vars(record)["request_id"] == "mine" and record.exc_info


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (chat("a", foo=1), "400 param=foo"),
        (chat("a refuse=Overloaded"), "503 overloaded"),
        ({**chat("a"), "model": "x"}, "404 model_not_found param=model"),
        ([], "400"),
    ],
)
async def test_a_refused_request_has_a_line_with_what_there_is_to_say(
    caplog: pytest.LogCaptureFixture, body: Any, end: str
) -> None:
    await post(caplog, body)
    assert f"request mine on {CHAT}: {end}" in [record.message for record in caplog.records]


def test_json_lines_carry_the_request_id_and_the_outcome(serve_app_factory: Callable[..., Served]) -> None:
    config = {
        "model": {"id": "fake"}, "replica": {"num_cpus": 0.1}, "logging": {"format": "json"},
        "metrics": {"host": "127.0.0.1"},
    }  # fmt: skip
    served = serve_app_factory("logged", config, FAKE_ENGINE)
    httpx.post(
        f"{served.url}{CHAT}", json=chat("a b"), headers={"x-request-id": "find-me"}, timeout=60, trust_env=False
    )

    def lines() -> list[dict[str, Any]]:
        texts = [path.read_text() for path in serve_logs().glob("replica_logged_ingress_*.log")]
        return [json.loads(line) for text in texts for line in text.splitlines() if "find-me" in line]

    eventually(lambda: any(line.get("tokens") == 2 for line in lines()))
    (line,) = [line for line in lines() if "tokens" in line]
    assert (line["request_id"], line["endpoint"], line["status"], line["model"]) == ("find-me", CHAT, 200, "fake")


def serve_logs() -> Path:
    from ray._private.worker import _global_node

    return Path(_global_node.get_session_dir_path()) / "logs" / "serve"
