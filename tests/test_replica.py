"""The replica's own logic over a fake engine, without Ray."""

import asyncio
import json
from typing import Any

import pytest

from serve_app.config import load_config
from serve_app.errors import ConfigError, EngineFailed, NotReady, Overloaded
from serve_app.protocol import ChatRequest, CompletionRequest, Item, Job, chat_job, completion_job, validate
from serve_app.replica import Replica, load
from tests.conftest import Hold
from tests.direct import counted, make_replica, until


async def make_job(replica: Replica, script: str, **fields: Any) -> Job:
    wire = validate(ChatRequest, {"model": "fake", "messages": [{"role": "user", "content": script}], **fields})
    return chat_job(wire, await replica.info(), max_choices=16, max_messages=16)


async def run(script: str, **fields: Any) -> list[Item]:
    replica = await make_replica()
    return [item async for item in replica.generate(await make_job(replica, script, **fields))]


async def test_a_stream_counts_every_token_once() -> None:
    items = await run("a b c d", stream=True)
    assert sum(item.tokens for item in items) == 4


async def test_without_streaming_the_body_follows_a_sign_that_tokens_come() -> None:
    began, body = await run("a b c", stream=False)
    assert (began.data, began.tokens, body.tokens) == (b"", 1, 2)
    assert json.loads(body.data)["choices"][0]["message"]["content"] == "a b c"


async def test_the_first_chunk_does_not_wait_for_the_second() -> None:
    replica = await make_replica()
    items = replica.generate(await make_job(replica, "a b delay=0.3", stream=True))
    first = await anext(items)
    assert (first.tokens, first.data.count(b"data:")) == (1, 1)
    await items.aclose()


async def test_what_queued_up_meanwhile_is_one_item() -> None:
    replica = await make_replica()
    items = replica.generate(await make_job(replica, "a b c d e f", stream=True))
    await anext(items)
    await until(lambda: counted(replica, "fake_running_requests") == 0)
    rest = [item async for item in items]
    assert [item.tokens for item in rest] == [5]


async def test_prompts_run_at_the_same_time(hold: Hold) -> None:
    replica = await make_replica()
    wire = validate(CompletionRequest, {"model": "fake", "prompt": [f"a {hold}"] * 4})
    task = asyncio.create_task(
        anext(replica.generate(completion_job(wire, await replica.info(), max_choices=1, max_prompts=4)))
    )
    await until(lambda: counted(replica, "fake_running_requests") == 4)
    hold.release()
    await task


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_the_first_item_and_keeps_its_class(stream: bool) -> None:
    (item,) = await run("refuse=Overloaded", stream=stream)
    assert isinstance(item.error, Overloaded)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engines_fault_is_told_without_its_details(stream: bool) -> None:
    (item,) = await run("a fail_at=0", stream=stream)
    assert isinstance(item.error, EngineFailed)
    assert "secret" not in item.error.message and b"secret" not in item.data


async def test_a_fault_in_mid_stream_ends_with_its_frames() -> None:
    items = await run("a b c fail_at=2 delay=0.01", stream=True)
    assert items[-1].error is not None
    assert items[-1].data.endswith(b"data: [DONE]\n\n") and b'"error"' in items[-1].data


async def test_tokens_before_a_fault_still_arrive() -> None:
    items = await run("a b c fail_at=2", stream=True)
    text = b"".join(item.data for item in items)
    assert sum(item.tokens for item in items) == 2 and text.index(b" b") < text.index(b'"error"')


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_by_the_server_is_an_error_to_the_client(stream: bool) -> None:
    items = await run("a b abort_at=1", stream=stream)
    assert isinstance(items[-1].error, NotReady) and items[-1].error.code == "aborted"


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_aborts_every_prompt_in_the_engine(stream: bool) -> None:
    replica = await make_replica()
    wire = validate(CompletionRequest, {"model": "fake", "prompt": ["a delay=600 b"] * 3, "stream": stream})
    items = replica.generate(completion_job(wire, await replica.info(), max_choices=1, max_prompts=4))
    reader = asyncio.create_task(anext(items))
    await until(lambda: counted(replica, "fake_running_requests") == 3)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert (counted(replica, "fake_running_requests"), counted(replica, "fake_aborts_total")) == (0, 3)


async def test_health_tells_what_the_watchdog_saw() -> None:
    replica = await make_replica()
    await replica.check_health()
    replica._engine._broken = "dead"  # type: ignore[attr-defined]
    await replica._watchdog.look()
    with pytest.raises(EngineFailed, match="dead"):
        await replica.check_health()


async def test_a_probe_answers_as_data() -> None:
    replica = await make_replica()
    assert (await replica.probe(30, 1)).error is None
    [_ async for _ in replica.generate(await make_job(replica, "dead=1 a"))]
    assert isinstance((await replica.probe(30, 1)).error, NotReady)


async def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineFailed, match="cannot start"):
        await make_replica({"model": {"id": "broken"}})


@pytest.mark.parametrize("path", ["no.such:thing", "serve_app.engines:nothing", "serve_app"])
def test_an_engine_factory_that_does_not_exist_is_a_configuration_error(path: str) -> None:
    with pytest.raises(ConfigError):
        load(path)


async def test_tokenizing_goes_to_the_engine() -> None:
    replica = await make_replica()
    job = await make_job(replica, "hé")
    tokens = (await replica.tokenize(job.requests[0])).value
    assert (await replica.detokenize(tokens)).value == "hé"


def test_the_default_factory_is_the_products() -> None:
    config = load_config({}, use_env=False)
    assert config.engine.kind == "local"
    assert load(Replica.__init__.__defaults__[0]).__module__ == "serve_app.engines"  # type: ignore[index]
