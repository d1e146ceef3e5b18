"""The engine over a real SGLang: its answers are the embedded engine's, its refusals name the field, nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from transformers import AutoModelForCausalLM

from serve_app.config import load_config
from serve_app.engines.base import Engine, GenerateRequest, SamplingParams
from serve_app.engines.local.engine import LocalEngine
from serve_app.engines.sglang.choice import Choice
from serve_app.engines.sglang.engine import SglangEngine
from serve_app.engines.sglang.manager import manager_class
from serve_app.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, Overloaded, Unsupported
from serve_app.metrics import observe_gaps
from tests.engines.local.conftest import VOCAB
from tests.engines.local.helpers import Answer, collect, request

LONG = "x" * 100
SOON_S = 120


@pytest.fixture
async def embedded(model: Path) -> AsyncIterator[LocalEngine]:
    tree = {"model": {"source": str(model), "drafter": None, "dtype": "float32", "device": "cpu"}}
    made = LocalEngine(load_config({**tree, "engine": {"threads": 1}}, use_env=False))
    await made.start()
    yield made
    await made.stop()


async def ask(engine: Any, wanted: GenerateRequest) -> Answer:
    return await asyncio.wait_for(collect(engine, wanted), SOON_S)


async def idle(engine: SglangEngine) -> None:
    """Until SGLang's own books are empty."""
    async with asyncio.timeout(SOON_S):
        while engine.stats().running or engine._host.manager.rid_to_state:
            await asyncio.sleep(0.05)


async def test_it_is_an_engine_and_describes_itself(engine: SglangEngine) -> None:
    info = engine.info()
    assert isinstance(engine, Engine)
    assert (info.id, info.max_model_len, info.vocab_size, info.continues) == ("smollm2-135m", 254, VOCAB, "greedy")


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 80, "ignore_eos": True},
        {"stop": ("\x0c",)},
        {"stop": ("x", "never there"), "min_tokens": 6},
        {"stop_token_ids": (127,)},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 0.7, "max_tokens": 40},
        {"logit_bias": {40: 100.0}, "max_tokens": 5},
        {"logprobs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt", ["hello", (1, 33, 44)])
async def test_a_greedy_answer_is_the_embedded_engines(
    engine: SglangEngine, embedded: LocalEngine, prompt: Any, sampling: dict[str, Any]
) -> None:
    theirs, ours = await ask(embedded, request(prompt, **sampling)), await ask(engine, request(prompt, **sampling))
    assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
    assert (ours.last.finish_reason, ours.last.stop_reason) == (theirs.last.finish_reason, theirs.last.stop_reason)
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (theirs.usage.prompt_tokens, len(ours.tokens))
    assert [entry.token for entry in ours.logprobs] == [entry.token for entry in theirs.logprobs]


async def test_only_the_last_chunk_has_usage_and_the_texts_add_up(engine: SglangEngine) -> None:
    answer = await ask(engine, request(max_tokens=20, ignore_eos=True))
    assert [chunk.usage for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)
    assert await engine.detokenize(answer.tokens) == answer.text


async def test_logprobs_equal_a_teacher_forced_score(engine: SglangEngine, model: Path) -> None:
    prompt = (1, 33, 44)
    answer = await ask(engine, request(prompt, temperature=0.7, logprobs=3, max_tokens=30, ignore_eos=True))
    with torch.inference_mode():
        scores = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
    scores = scores.log_softmax(-1)[len(prompt) - 1 : -1]
    assert [entry.token_id for entry in answer.logprobs] == answer.tokens
    for entry, row in zip(answer.logprobs, scores, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert [other.logprob for other in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


async def test_choices_are_independent(engine: SglangEngine) -> None:
    wanted = request(temperature=1.0, n=3, max_tokens=30, ignore_eos=True)
    chunks = [chunk async for chunk in engine.submit(wanted)]
    texts = {i: tuple(t for chunk in chunks if chunk.index == i for t in chunk.token_ids) for i in range(3)}
    assert [len(tokens) for tokens in texts.values()] == [30, 30, 30] and len(set(texts.values())) == 3


@pytest.mark.parametrize("cut", [1, 9, 23])
async def test_a_continued_answer_is_the_undisturbed_one(engine: SglangEngine, cut: int) -> None:
    whole = await ask(engine, request(max_tokens=24, ignore_eos=True))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    wanted = GenerateRequest(f"resumed{cut}", params, prompt="hello", emitted=tuple(whole.tokens[:cut]))
    rest = await ask(engine, wanted)
    assert rest.tokens == whole.tokens[cut:]
    assert (rest.usage.prompt_tokens, rest.usage.completion_tokens) == (5, 24)


async def test_an_answer_follows_its_json_schema(engine: SglangEngine) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = request(json_schema=json.dumps(schema), temperature=1.0, max_tokens=100)
    answer = await ask(engine, wanted)
    assert json.loads(answer.text)["n"] in (1, 2)
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)


async def test_a_wrong_json_schema_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ask(engine, request(json_schema='{"type": "no type"}'))
    assert caught.value.param == "response_format"
    await idle(engine)


async def test_a_repeated_prompt_is_cached(engine: SglangEngine) -> None:
    await ask(engine, request(LONG, max_tokens=1))
    assert (await ask(engine, request(LONG, max_tokens=1))).usage.cached_tokens > 90


async def test_an_answer_can_fill_the_context(engine: SglangEngine) -> None:
    answer = await ask(engine, request(LONG, max_tokens=None, ignore_eos=True))
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == engine.info().max_model_len
    assert answer.last.finish_reason == "length"


async def test_chats_go_through_the_models_template(engine: SglangEngine, embedded: LocalEngine) -> None:
    chat = GenerateRequest("c", SamplingParams(), messages=[{"role": "user", "content": "say <|im_end|>"}])
    assert await engine.tokenize(chat) == await embedded.tokenize(chat)


async def test_an_abort_ends_the_stream_and_frees_sglangs_state(engine: SglangEngine) -> None:
    wanted = request(LONG, max_tokens=None, ignore_eos=True)
    chunks = engine.submit(wanted)
    await anext(chunks)
    assert engine.stats().running == 1
    assert await engine.abort(wanted.request_id)
    rest = [chunk async for chunk in chunks]
    assert rest[-1].finish_reason == "abort"
    assert not await engine.abort(wanted.request_id)
    await idle(engine)


async def test_a_reader_that_leaves_aborts(engine: SglangEngine) -> None:
    async with contextlib.aclosing(engine.submit(request(LONG, max_tokens=None, ignore_eos=True))) as chunks:
        await anext(chunks)
    await idle(engine)


async def test_a_reader_that_leaves_before_it_began_leaves_nothing(engine: SglangEngine) -> None:
    chunks = engine.submit(request(LONG, max_tokens=None, ignore_eos=True))
    first = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()
    await idle(engine)


async def test_more_than_slots_and_queue_hold_is_refused(engine: SglangEngine) -> None:
    async def first(wanted: GenerateRequest) -> Any:
        chunks = engine.submit(wanted)
        await anext(chunks)
        return chunks

    wanted = request(temperature=1.0, n=8, max_tokens=200, ignore_eos=True)
    chunks = await first(wanted)
    assert engine.stats().running + engine.stats().queued == 8 and engine.stats().queued >= 4
    with pytest.raises(Overloaded):
        await first(request())
    with pytest.raises(InvalidRequest, match="already running"):
        await first(wanted)
    await chunks.aclose()
    await idle(engine)
    with pytest.raises(InvalidRequest) as caught:
        await first(request(n=9))
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("wanted", "error", "param"),
    [
        (request(temperature=1.0, seed=1), Unsupported, "seed"),
        (request(logprobs=1, frequency_penalty=1.0), Unsupported, "logprobs"),
        (request("x" * 260), ContextLengthExceeded, "prompt"),
        (request("x" * 253, max_tokens=1), ContextLengthExceeded, "prompt"),
        (request("x" * 200, max_tokens=60), ContextLengthExceeded, "max_tokens"),
        (request((VOCAB,)), InvalidRequest, "prompt"),
        (GenerateRequest("m", SamplingParams(), messages=[]), InvalidRequest, "messages"),
    ],
)
async def test_refusals_name_the_field(
    engine: SglangEngine, wanted: GenerateRequest, error: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(error) as caught:
        await anext(engine.submit(wanted))
    assert caught.value.param == param
    await idle(engine)


async def test_health_generates(engine: SglangEngine) -> None:
    await engine.health()
    age = engine.stats().last_token_age_s
    assert age is not None and age < SOON_S
    await idle(engine)


async def test_a_computed_part_of_a_prompt_is_a_sign_of_life(engine: SglangEngine) -> None:
    """Nobody's token comes while the chunks of a prompt longer than one are computed."""
    before = engine._computed
    await ask(engine, request("sign of life " * 10, max_tokens=1))
    async with asyncio.timeout(SOON_S):
        while engine._computed < before + 100:
            await asyncio.sleep(0.01)
    await idle(engine)
    engine._alive_at = None
    engine._computed = 0  # as if a part came now
    engine._on_watch()
    assert engine.stats().last_token_age_s is not None


async def test_the_page_has_the_schedulers_series_and_this_processs(
    engine: SglangEngine, registry: CollectorRegistry
) -> None:
    await ask(engine, request())
    names = {family.name for family in registry.collect()}
    assert {"sglang:num_running_reqs", "sglang:e2e_request_latency_seconds", "ddtree_requests"} <= names
    assert registry.get_sample_value("ddtree_requests_total", {"model": "smollm2-135m", "outcome": "length"})
    assert registry.get_sample_value("ddtree_request_slots", {"model": "smollm2-135m"}) == 4
    page = generate_latest(registry).decode().splitlines()
    series = [line.rsplit(" ", 1)[0] for line in page if not line.startswith("#")]
    assert len(series) == len(set(series))


@pytest.mark.parametrize(
    "sampling", [{}, {"stop": ("\x0c",)}, {"max_tokens": 30, "ignore_eos": True}, {"logprobs": 2}], ids=str
)
async def test_a_step_gives_what_sglangs_own_handler_gives(
    engine: SglangEngine, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """SGLang's own is the reference, and its series count the same."""

    async def found() -> tuple[Any, ...]:
        before = sglang_counts(registry)
        answer = await ask(engine, request("hello", **sampling))
        await idle(engine)
        after = sglang_counts(registry)
        changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return [replace(chunk, usage=None) for chunk in answer.chunks], answer.usage, changes

    await ask(engine, request("hello", max_tokens=1))  # cached alike
    ours = await found()
    monkeypatch.setattr(engine._host.manager, "_observed", True)
    assert await found() == ours
    assert sum(ours[2].values())


def sglang_counts(registry: CollectorRegistry) -> dict[str, float]:
    """Observations of the tokenizer manager's series, which no scheduler writes."""
    wanted = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    names = {f"sglang:{name}_count" for name in wanted} | {
        "sglang:generation_tokens_total",
        "sglang:num_requests_total",
    }
    samples = [sample for family in registry.collect() for sample in family.samples if sample.name in names]
    counts: dict[str, float] = {}
    for sample in samples:
        counts[sample.name] = counts.get(sample.name, 0.0) + sample.value
    return counts


async def test_what_sglang_itself_asks_runs_beside_it(engine: SglangEngine) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    asked: dict[str, Any] = {"input_ids": [1, 33, 44], "sampling_params": {"max_new_tokens": 40, "temperature": 0.0}}
    host = engine._host
    assert host is not None

    async def theirs() -> list[int]:
        outputs = host.manager.generate_request(GenerateReqInput(rid="theirs", stream=True, **asked), None)
        return [token async for output in outputs for token in output["output_ids"]]

    alone = await asyncio.wait_for(asyncio.wrap_future(host.call(theirs())), SOON_S)
    wanted = request("hello", max_tokens=60, ignore_eos=True)
    undisturbed = await ask(engine, wanted)
    beside = asyncio.ensure_future(ask(engine, wanted))
    assert await asyncio.wait_for(asyncio.wrap_future(host.call(theirs())), SOON_S) == alone
    assert (await beside).tokens == undisturbed.tokens
    await idle(engine)


async def test_a_fault_in_one_answer_ends_only_that(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Choice.feed

    def faulty(self: Choice, output: Any) -> Any:
        if self.rid.startswith("faulty"):
            raise RuntimeError("broken")
        return feed(self, output)

    monkeypatch.setattr(Choice, "feed", faulty)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    other = asyncio.ensure_future(ask(engine, request("hello", max_tokens=40, ignore_eos=True)))
    with pytest.raises(EngineFailed, match="failed while it worked"):
        await ask(engine, GenerateRequest("faulty", params, prompt="hello"))
    assert len((await other).tokens) == 40
    await idle(engine)


@pytest.mark.parametrize("prompt", ["x" * 20, "é" * 120])
async def test_a_prompt_is_the_same_on_the_loop_and_in_a_thread(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    wanted = request(prompt, max_tokens=3, ignore_eos=True)
    short = await ask(engine, wanted)
    monkeypatch.setattr("serve_app.engines.sglang.engine._SHORT", 0)
    assert (await ask(engine, wanted)).tokens == short.tokens


def test_gaps_are_counted_as_sglang_counts_them(sglang_on_cpu: None) -> None:
    from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

    gaps = [(0.01, 4), (0.2, 1), (3.0, 2), (0.0, 3), (1e9, 1), (0.1, 1)]
    one, other = (Histogram("gaps", "Gaps.", ("model",), registry=CollectorRegistry()) for _ in range(2))
    observe_gaps(one.labels("m"), gaps)
    collector = SimpleNamespace(histogram_inter_token_latency=other)
    for seconds, count in gaps:
        TokenizerMetricsCollector.observe_inter_token_latency(collector, {"model": "m"}, seconds, count)
    # Not when they were made; and the order in which the sum's terms are rounded is Python's.
    ours, theirs = (h.collect()[0].samples[:-1] for h in (one, other))
    assert [(s.name, s.labels) for s in ours] == [(s.name, s.labels) for s in theirs]
    assert [s.value for s in ours] == pytest.approx([s.value for s in theirs], rel=1e-12)


async def test_a_fast_scheduler_leaves_turns_to_requests(sglang_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    messages, turns = iter(range(1000)), 0

    async def take(message: Any) -> None: ...

    async def others() -> None:
        nonlocal turns
        while not receiving.done():
            turns += 1
            await asyncio.sleep(0)

    # There always is a message, until the test ends.
    monkeypatch.setattr("sglang.srt.managers.io_struct.sock_recv", lambda *_: next(messages))
    here, there = socket.socketpair()
    with here, there:
        manager = object.__new__(manager_class())
        manager._sockets, manager._message = SimpleNamespace(taken=SimpleNamespace(FD=here.fileno())), take
        manager.soft_watchdog = SimpleNamespace(feed=lambda: None)
        receiving = asyncio.ensure_future(manager.handle_loop())
        _, ended = await asyncio.gather(others(), receiving, return_exceptions=True)
    assert isinstance(ended, RuntimeError) and turns > 900
