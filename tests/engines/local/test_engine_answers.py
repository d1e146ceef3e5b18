"""What a reader gets from the engine: answers, refusals, choices, log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from serve_app.config import Config
from serve_app.engines.base import Engine, GenerateRequest, SamplingParams
from serve_app.engines.local.engine import LocalEngine
from serve_app.errors import ConfigError, ContextLengthExceeded, InvalidRequest, NotReady, Unsupported
from tests.engines.local.conftest import VOCAB, write_drafter
from tests.engines.local.helpers import collect, request, running

Make = Callable[..., Config]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


async def test_greedy_text_equals_transformers_generate(make_config: Make, tiny: Path) -> None:
    prompt = (1, 70, 80, 90)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=2)
    async with running(make_config()) as engine:
        answer = await collect(engine, request(prompt, max_tokens=40))
    assert answer.tokens == expected[0, 4:].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_method_and_batch_do_not_change_the_answer(make_config: Make, temperature: float) -> None:
    def requests() -> list[GenerateRequest]:
        return [request("x" * n, temperature=temperature, seed=n, max_tokens=10 + n) for n in (1, 5, 40, 90, 2, 7)]

    answers = []
    variants = (
        {"method": "none"},
        {"method": "chain"},
        {"method": "chain", "budget": 0},
        {"budget": 20},
        {"budget": 0},
    )
    for speculation in variants:
        async with running(make_config(speculation=speculation)) as engine:
            alone = [(await collect(engine, one)).tokens for one in requests()]
            together = [one.tokens for one in await asyncio.gather(*(collect(engine, r) for r in requests()))]
        answers += [alone, together]
    assert all(answer == answers[0] for answer in answers)


async def test_a_seed_repeats_and_no_seed_varies(make_config: Make) -> None:
    async with running(make_config()) as engine:
        seeded = [(await collect(engine, request(temperature=1.0, seed=4))).tokens for _ in range(2)]
        free = [(await collect(engine, request(temperature=1.0))).tokens for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert free[0] != free[1]


async def test_choices_are_those_of_successive_seeds(make_config: Make) -> None:
    async with running(make_config()) as engine:
        both = request(temperature=1.0, seed=8, n=2)
        chunks = [chunk async for chunk in engine.submit(both)]
        single = [(await collect(engine, request(temperature=1.0, seed=seed))).tokens for seed in (8, 9)]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == single[index]
        assert own[-1].usage is not None
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 2


async def test_logprobs_equal_a_teacher_forced_score(make_config: Make, tiny: Path) -> None:
    prompt = (1, 33, 44)
    async with running(make_config()) as engine:
        wanted = request(prompt, temperature=0.8, seed=1, logprobs=3, frequency_penalty=0.5, max_tokens=30)
        answer = await collect(engine, wanted)
    with torch.inference_mode():
        scores = AutoModelForCausalLM.from_pretrained(tiny)(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
    scores = scores.log_softmax(-1)[len(prompt) - 1 : -1]
    assert [entry.token_id for entry in answer.logprobs] == answer.tokens
    for entry, row in zip(answer.logprobs, scores, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [other.logprob for other in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert entry.top[0].token_id == int(row.argmax())


async def test_bytes_of_logprobs_add_up_to_the_text_whatever_special_tokens_come(make_config: Make) -> None:
    bias = dict.fromkeys((1, 2, 40, 50, 60), 100.0)
    async with running(make_config()) as engine:
        wanted = request(temperature=2.0, seed=3, logprobs=0, max_tokens=40, ignore_eos=True, logit_bias=bias)
        answer = await collect(engine, wanted)
    assert {1, 2} & set(answer.tokens) and {40, 50, 60} & set(answer.tokens)
    assert b"".join(bytes(entry.bytes) for entry in answer.logprobs).decode() == answer.text
    assert {entry.token for entry in answer.logprobs if not entry.bytes} <= {"<|im_start|>", "<|im_end|>"}


async def test_text_tokens_and_usage_agree(make_config: Make) -> None:
    async with running(make_config()) as engine:
        answer = await collect(engine, request("some prompt", max_tokens=50, ignore_eos=True))
        assert await engine.detokenize(answer.tokens) == answer.text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 50)
    assert [chunk.usage for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)


async def test_chat_messages_go_through_the_template(make_config: Make) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    chat = GenerateRequest("c", SamplingParams(), messages=[{"role": "user", "content": parts}])
    async with running(make_config()) as engine:
        rendered = await engine.tokenize(chat)
        plain = await engine.tokenize(request("user\nhi"))
    newline = 3 + 10
    assert rendered == [1, *plain, 2, newline, 1, *(3 + byte for byte in b"assistant\n")]


@pytest.mark.parametrize(
    ("wanted", "error", "param", "said"),
    [
        ({"messages": [{"role": "forbidden", "content": "x"}]}, InvalidRequest, "messages", "roles must be known"),
        ({"messages": []}, InvalidRequest, "messages", "empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            Unsupported,
            "messages[0].content[0]",
            "",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, Unsupported, "tools", ""),
        ({"prompt": ""}, InvalidRequest, "prompt", "empty"),
        ({"prompt": "a\ud800"}, InvalidRequest, "prompt", "Unicode"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, InvalidRequest, "messages", "Unicode"),
        ({"prompt_token_ids": (VOCAB,)}, InvalidRequest, "prompt", str(VOCAB - 1)),
        ({"prompt": "x" * 256}, ContextLengthExceeded, "prompt", "256"),
        ({"prompt": "x" * 250, "max_tokens": 7}, ContextLengthExceeded, "max_tokens", "257"),
        ({"prompt": "x", "max_tokens": 2, "min_tokens": 3}, InvalidRequest, "min_tokens", ""),
        ({"prompt": "x", "logit_bias": {VOCAB: 1.0}}, InvalidRequest, "logit_bias", ""),
    ],
)
async def test_refusals_name_the_field(
    make_config: Make, wanted: dict[str, Any], error: type[InvalidRequest], param: str, said: str
) -> None:
    sampling = {key: wanted.pop(key) for key in ("max_tokens", "min_tokens", "logit_bias") if key in wanted}
    async with running(make_config()) as engine:
        with pytest.raises(error) as caught:
            await anext(engine.submit(GenerateRequest("r", SamplingParams(**sampling), **wanted)))
        assert (await collect(engine, request())).tokens
    assert caught.value.param == param
    assert said in caught.value.message


async def test_the_longest_prompt_gets_its_one_token(make_config: Make) -> None:
    async with running(make_config()) as engine:
        answer = await collect(engine, request("x" * 255, max_tokens=None))
    assert (answer.usage.completion_tokens, answer.last.finish_reason) == (1, "length")


async def test_every_forward_is_counted_as_eager_on_a_cpu(make_config: Make) -> None:
    registry = CollectorRegistry()
    async with running(make_config(), registry) as engine:
        await collect(engine, request(max_tokens=20, ignore_eos=True))
    steps = registry.get_sample_value("ddtree_verify_steps_total", {"model": "smollm2-135m"})
    for role, more in (("draft", 0), ("target", 2)):  # the health check at start, and this prompt's prefill
        labels = {"model": "smollm2-135m", "role": role, "reason": "no_cuda"}
        assert registry.get_sample_value("ddtree_graph_fallbacks_total", labels) == (steps or 0) + more


async def test_it_is_an_engine_and_describes_itself(make_config: Make) -> None:
    async with running(make_config(model={"context_length": 100})) as engine:
        assert isinstance(engine, Engine)
        info = engine.info()
    assert (info.id, info.max_model_len, info.vocab_size) == ("smollm2-135m", 100, VOCAB)


@pytest.mark.parametrize(
    ("sections", "param"),
    [
        ({"model": {"context_length": 1000}}, "model.context_length"),
        ({"model": {"device": "cuda"}}, "model.device"),
        ({"model": {"drafter": "auto"}, "speculation": {"method": "chain"}}, "model.drafter"),
    ],
)
async def test_an_unusable_configuration_is_refused_at_start(
    make_config: Make, sections: dict[str, Any], param: str
) -> None:
    if param == "model.device" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    engine = LocalEngine(make_config(**sections))
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    assert caught.value.param == param
    with pytest.raises(NotReady):
        await anext(engine.submit(request()))
    await engine.stop()


async def test_a_drafter_without_a_tensor_is_refused_at_start(make_config: Make, tmp_path: Path) -> None:
    engine = LocalEngine(make_config(model={"drafter": str(write_drafter(tmp_path, drop="fc.weight"))}))
    with pytest.raises(ConfigError, match=r"fc\.weight"):
        await engine.start()
