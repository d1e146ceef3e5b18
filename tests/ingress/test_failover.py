"""Answers that go on when their replica is lost, over replicas in this process that break off where they are told."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.engines.base import GenerateRequest, ModelInfo, SamplingParams
from serve_app.errors import EngineFailed, EngineGone, NoReplicas, NotReady, Overloaded, ServeError, Unsupported
from serve_app.ingress.failover import MET_AGAIN, OTHERS_IF_FULL, Failover, may_resume
from serve_app.ingress.generation import Gateway
from serve_app.protocol import Item, Job
from tests.conftest import chat
from tests.direct import DirectBackend, direct_client, make_gateway

LOST = NotReady("gone", code="replica_lost")


class Mortal(DirectBackend):
    """Breaks off attempt i after `lives[i]` items, with an error that may differ."""

    def __init__(self, gateway: Gateway, lives: list[int], errors: dict[int, ServeError] | None = None) -> None:
        super().__init__(gateway.backend.replica)  # type: ignore[attr-defined]
        self.lives, self.errors, self.jobs = lives, errors or {}, list[Job]()

    async def generate(self, job: Job) -> AsyncIterator[Item]:
        attempt = len(self.jobs)
        self.jobs.append(job)
        left = self.lives[attempt] if attempt < len(self.lives) else 10**9
        async for item in super().generate(job):
            if left == 0:
                raise self.errors.get(attempt, LOST)
            left -= 1
            yield item


async def run(
    body: dict[str, Any], lives: list[int], errors: dict[int, ServeError] | None = None, **config: Any
) -> tuple[Any, Mortal, Gateway]:
    gateway = await make_gateway({"ingress": config, "model": {"id": body["model"]}})
    gateway.backend = backend = Mortal(gateway, lives, errors)
    async with direct_client(gateway) as client:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await client.post(path, json=body)
    return response, backend, gateway


def events(response: Any) -> list[Any]:
    lines = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def outcomes(gateway: Gateway) -> dict[str, float]:
    return {
        outcome: gateway.registry.get_sample_value("gateway_resumes_total", {"outcome": outcome}) or 0
        for outcome in ("resumed", "refused", "exhausted")
    }


def stream(script: str, **fields: Any) -> dict[str, Any]:
    return chat(script, stream=True, stream_options={"include_usage": True}, **fields)


@pytest.mark.parametrize("life", [0, 1, 3, 5])
async def test_the_events_are_those_of_an_undisturbed_run(life: int) -> None:
    script = "a b c d e delay=0.01"
    whole = events((await run(stream(script), []))[0])
    broken = events((await run(stream(script), [life]))[0])
    strip = [{k: v for k, v in event.items() if k not in ("id", "created")} for event in broken]
    assert strip == [{k: v for k, v in event.items() if k not in ("id", "created")} for event in whole]


async def test_usage_counts_the_prompt_once_and_every_token() -> None:
    response, _, _ = await run(stream("a b c d e delay=0.01"), [2, 1])
    assert events(response)[-1]["usage"]["completion_tokens"] == 5
    assert events(response)[-1]["usage"]["prompt_tokens"] == 6


async def test_id_and_time_stay() -> None:
    response, _, _ = await run(stream("a b c delay=0.01"), [1])
    assert len({(event["id"], event["created"]) for event in events(response)}) == 1


async def test_a_character_in_two_halves_is_whole() -> None:
    body = stream("bytes=61c3a962e282ac delay=0.01")
    response, _, _ = await run(body, [1, 1])
    said = "".join(e["choices"][0]["delta"].get("content", "") for e in events(response) if e["choices"])
    assert said == "aéb€"


async def test_log_probabilities_and_offsets_continue() -> None:
    fields = {"logprobs": 0, "stream": True, "max_tokens": 16, "model": "fake"}
    body = {"prompt": "bytes=61c3a962e282ac63 delay=0.01", **fields}
    whole, broken = [events((await run(body, lives))[0]) for lives in ([], [2, 2])]

    def offsets(those: list[Any]) -> list[int]:
        return [o for e in those for o in e["choices"][0]["logprobs"]["text_offset"]]

    assert offsets(broken) == offsets(whole)


async def test_each_of_several_choices_goes_on() -> None:
    response, backend, _ = await run(stream("a b c delay=0.01", n=3), [2])
    said = {0: "", 1: "", 2: ""}
    ends = []
    for event in events(response):
        for choice in event["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
            ends += [choice["index"]] if choice["finish_reason"] else []
    assert set(said.values()) == {"a b c"} and sorted(ends) == [0, 1, 2]
    assert len(backend.jobs) == 2


@pytest.mark.parametrize("prompts", [["a", "b c d delay=0.02"], ["a b delay=0.02", "c"]])
async def test_a_finished_prompt_is_not_run_again(prompts: list[str]) -> None:
    body = {"prompt": prompts, "stream": True, "model": "fake", "stream_options": {"include_usage": True}}
    response, _, _ = await run(body, [2])
    assert events(response)[-1]["usage"]["completion_tokens"] == sum(
        1 for p in prompts for w in p.split() if len(w) == 1
    )


@pytest.mark.parametrize("life", [0, 1])
async def test_an_answer_that_does_not_stream_starts_anew(life: int) -> None:
    response, backend, gateway = await run(chat("a b c"), [life, life])
    assert response.json()["choices"][0]["message"]["content"] == "a b c"
    assert response.json()["usage"]["completion_tokens"] == 3
    assert len(backend.jobs) == 3 and outcomes(gateway)["resumed"] == 1 + life


async def test_a_stream_loses_a_bounded_number_of_replicas() -> None:
    response, backend, gateway = await run(stream("a b c d e f delay=0.01"), [1, 1, 1], max_resumes=2)
    error = events(response)[-1]["error"]
    assert (error["code"], error["type"]) == ("replica_lost", "server_error")
    assert len(backend.jobs) == 3 and outcomes(gateway) == {"resumed": 2, "refused": 0, "exhausted": 1}


async def test_a_request_that_ends_every_replica_is_not_to_be_retried() -> None:
    response, _, _ = await run(chat("a b"), [0, 0, 0], max_resumes=2)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "replica_lost")
    assert response.headers["x-should-retry"] == "false"


async def test_without_resumes_a_lost_answer_may_be_retried() -> None:
    response, _, _ = await run(chat("a b"), [0], max_resumes=0)
    assert (response.status_code, response.headers["x-should-retry"]) == (503, "true")


async def test_where_policy_forbids_it_the_stream_ends_with_an_error() -> None:
    response, backend, gateway = await run(stream("a b c delay=0.01"), [1], resume="never")
    assert events(response)[-1]["error"]["code"] == "replica_lost"
    assert len(backend.jobs) == 1 and outcomes(gateway)["refused"] == 1


async def test_where_the_engine_cannot_keep_a_seed_the_stream_ends_with_an_error() -> None:
    body = {**stream("a b c delay=0.01", seed=7), "model": "fake-greedy"}
    assert events((await run(body, [1]))[0])[-1]["error"]["code"] == "replica_lost"


async def test_a_replica_that_stops_hands_its_streams_on() -> None:
    aborted = NotReady("stopping", code="aborted")
    response, _, _ = await run(stream("a b c d delay=0.01"), [2], {0: aborted})
    assert events(response)[-1]["usage"]["completion_tokens"] == 4


async def test_where_an_engine_cannot_go_on_the_client_sees_the_loss() -> None:
    unable = Unsupported("not behind penalties", param="emitted")
    response, backend, gateway = await run(stream("a b c d delay=0.01"), [2, 0], {1: unable})
    assert events(response)[-1]["error"]["code"] == "replica_lost" and len(backend.jobs) == 2
    assert outcomes(gateway) == {"resumed": 0, "refused": 1, "exhausted": 0}


@pytest.mark.parametrize("streams", [False, True])
async def test_where_no_replica_is_left_the_client_sees_the_loss(streams: bool) -> None:
    """As when a drain has taken its time: nobody else has failed on the job, and another server may take it."""
    body = stream("a b c d delay=0.01") if streams else chat("a b c d delay=0.01")
    response, backend, gateway = await run(body, [1, 0], {1: NoReplicas("none")})
    assert len(backend.jobs) == 2 and outcomes(gateway) == {"resumed": 0, "refused": 1, "exhausted": 0}
    if streams:
        assert events(response)[-1]["error"]["code"] == "replica_lost"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
        assert response.headers["x-should-retry"] == "true"


async def test_where_there_is_no_replica_it_is_said_at_once() -> None:
    response, backend, _ = await run(chat("a"), [0], {0: NoReplicas("none")})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert response.headers["x-should-retry"] == "true" and len(backend.jobs) == 1


async def test_while_the_others_are_full_a_resumed_stream_waits() -> None:
    full = Overloaded("full")
    response, backend, gateway = await run(stream("a b c d delay=0.01"), [2, 0, 0], {1: full, 2: full})
    assert events(response)[-1]["usage"]["completion_tokens"] == 4
    assert len(backend.jobs) == 4 and outcomes(gateway)["resumed"] == 1


async def test_a_new_request_does_not_wait_for_room() -> None:
    response, backend, _ = await run(chat("a"), [0], {0: Overloaded("full", retry_after=1)})
    assert (response.status_code, len(backend.jobs)) == (503, 1)


async def test_a_fault_of_the_engine_is_not_repeated() -> None:
    response, backend, _ = await run(stream("a b c delay=0.01"), [1], {0: EngineFailed("no")})
    assert events(response)[-1]["error"]["code"] == "engine_error" and len(backend.jobs) == 1


class Watched(DirectBackend):
    """Knows how many of its streams are open."""

    open = 0

    async def generate(self, job: Job) -> AsyncIterator[Item]:
        self.open += 1
        try:
            async with contextlib.aclosing(super().generate(job)) as items:  # type: ignore[type-var]
                async for item in items:
                    yield item
        finally:
            self.open -= 1


async def test_once_a_stream_is_closed_its_replica_works_no_more_for_it() -> None:
    gateway = await make_gateway()
    backend = Watched(gateway.backend.replica)  # type: ignore[attr-defined]
    request = GenerateRequest("r", SamplingParams(), prompt="a delay=0.01 b repeat=400")
    job = Job("j", 1, "m", True, True, False, (request,))
    failover = Failover(backend, gateway.config.ingress, gateway.metrics, 2)
    items: Any = failover.items(job, await backend.info())
    await anext(items)
    assert backend.open == 1
    await items.aclose()
    assert backend.open == 0


class Gone(DirectBackend):
    """Attempt i meets the replica `names[i]`, whose engine is gone after `life` items; later ones meet another."""

    error: ServeError = EngineGone("gone", retry_after=1)

    def __init__(self, gateway: Gateway, names: list[str], life: int) -> None:
        super().__init__(gateway.backend.replica)  # type: ignore[attr-defined]
        self.names, self.life, self.jobs = names, life, list[Job]()

    async def generate(self, job: Job) -> AsyncIterator[Item]:
        self.jobs.append(job)
        left = self.life if len(self.jobs) <= len(self.names) else 10**9
        async for item in super().generate(job):
            if left == 0:
                yield Item(error=self.error, replica=self.names[len(self.jobs) - 1])
                return
            left -= 1
            yield item


class Full(Gone):
    """Or is full."""

    error = Overloaded("full", retry_after=1)


async def meet(
    body: dict[str, Any], names: list[str], life: int = 0, kind: type[Gone] = Gone, replicas: int = 9, **config: Any
) -> tuple[Any, Gone, Gateway]:
    gateway = await make_gateway({"ingress": config, "replica": {"num_replicas": replicas}})
    gateway.backend = backend = kind(gateway, names, life)
    async with direct_client(gateway) as client:
        return await client.post("/v1/chat/completions", json=body), backend, gateway


@pytest.mark.parametrize("resume", ["all", "never"])
@pytest.mark.parametrize("streams", [True, False])
async def test_an_engine_that_is_gone_is_not_met_again(resume: str, streams: bool) -> None:
    names = ["one", "two", "three", "four", "five"]  # more than it may lose: none of them took it
    response, backend, gateway = await meet(chat("a b", stream=streams), names, resume=resume, max_resumes=0)
    assert response.status_code == 200 and '"error"' not in response.text
    assert [job.shunned for job in backend.jobs] == [frozenset(names[:count]) for count in range(6)]
    assert outcomes(gateway) == {"resumed": 0, "refused": 0, "exhausted": 0}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("names", [["one", "two", *["one"] * 9], [""] * 9])
async def test_where_no_engine_is_left_the_client_may_come_again(names: list[str], streams: bool) -> None:
    response, backend, _ = await meet(chat("a b", stream=streams), names)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
    assert len(backend.jobs) == len(set(names) - {""}) + MET_AGAIN + 1


@pytest.mark.parametrize("streams", [True, False])
async def test_a_full_engine_does_not_refuse_for_others_that_are_not(streams: bool) -> None:
    response, backend, _ = await meet(chat("a b", stream=streams), ["one", "two"], kind=Full, resume="never")
    assert response.status_code == 200 and '"error"' not in response.text
    assert [job.shunned for job in backend.jobs] == [frozenset(), {"one"}, {"one", "two"}]


@pytest.mark.parametrize(
    ("names", "replicas", "tries"),
    [
        ([str(i) for i in range(9)], 9, OTHERS_IF_FULL + 1),
        (["one"] * 9, 9, 2),  # the others are gone
        (["one", "two", "one"], 2, 2),
        (["one"] * 9, 1, 1),
    ],
)
async def test_where_all_are_full_it_is_said_soon(names: list[str], replicas: int, tries: int) -> None:
    response, backend, _ = await meet(chat("a b"), names, kind=Full, replicas=replicas)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert response.headers["retry-after"] == "1" and len(backend.jobs) == tries


async def test_a_router_that_does_not_ask_may_find_another_all_the_same() -> None:
    response, backend, _ = await meet(chat("a b"), ["one", "one"])
    assert response.status_code == 200 and len(backend.jobs) == 3


@pytest.mark.parametrize(("resume", "outcome"), [("all", "resumed"), ("never", "refused")])
async def test_an_engine_gone_behind_its_first_item_is_a_lost_replica(resume: str, outcome: str) -> None:
    """Of a request with several prompts one was taken, and another met the death."""
    response, backend, gateway = await meet(stream("a b c delay=0.01"), ["one"], life=1, resume=resume)
    assert outcomes(gateway)[outcome] == 1 and len(backend.jobs) == 1 + (resume == "all")
    assert ("replica_lost" in response.text) == (resume == "never")


@pytest.mark.parametrize(
    ("sampling", "continues", "resume", "allowed"),
    [
        (SamplingParams(temperature=0), "greedy", "greedy", True),
        (SamplingParams(temperature=0, seed=1), "greedy", "greedy", True),
        (SamplingParams(temperature=0), "none", "all", False),
        (SamplingParams(temperature=0), "seeded", "never", False),
        (SamplingParams(), "greedy", "all", True),
        (SamplingParams(), "seeded", "greedy", False),
        (SamplingParams(seed=1), "greedy", "all", False),
        (SamplingParams(seed=1), "seeded", "all", True),
        (SamplingParams(temperature=0, json_schema="{}"), "seeded", "all", False),
    ],
)
async def test_what_may_go_on(sampling: SamplingParams, continues: Any, resume: str, allowed: bool) -> None:
    gateway = await make_gateway({"ingress": {"resume": resume}})
    info = ModelInfo("m", 16, 16, 1, continues=continues)
    job = Job("j", 1, "m", True, True, False, (GenerateRequest("r", sampling, prompt="p"),))
    assert may_resume(job, info, gateway.config.ingress) is allowed


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [({}, True), ({"strict": False}, True), ({"strict": True}, False), ({"tool_choice": "required"}, False)],
)
async def test_an_answer_that_is_held_to_calls_does_not_go_on(fields: dict[str, Any], allowed: bool) -> None:
    """As no replica can: the client need not wait for one to say so."""
    gateway = await make_gateway({})
    info = ModelInfo("m", 16, 16, 1, continues="seeded")
    tools = ({"type": "function", "function": {"name": "f", **{k: v for k, v in fields.items() if k == "strict"}}},)
    choice = fields.get("tool_choice", "auto")
    asked = GenerateRequest("r", SamplingParams(), messages=[], tools=tools, tool_choice=choice)
    assert may_resume(Job("j", 1, "m", True, True, False, (asked,)), info, gateway.config.ingress) is allowed
