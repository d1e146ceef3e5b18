"""Tools over a real SGLang: a random model that is held to calls makes calls."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve_app.config import Config
from serve_app.engines.base import Chunk, GenerateRequest, SamplingParams
from serve_app.engines.sglang.engine import SglangEngine
from serve_app.errors import InvalidRequest, Unsupported
from tests.engines.local.conftest import write_model
from tests.engines.sglang.conftest import ON_A_CPU
from tests.engines.sglang.parsers import write_marked

SOON_S = 120
USER = [{"role": "user", "content": "hi"}]
PARSERS = {
    "attention_backend": "torch_native",
    "tool_call_parser": "qwen",
    # A random model would write spaces for ever.
    "server_args": {**ON_A_CPU, "constrained_json_disable_any_whitespace": True},
}


def pick(name: str, n: Any = None) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"n": n or {"enum": [1, 2]}, "sure": {"type": "boolean"}},
        "required": ["n", "sure"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def engine(
    sglang_on_cpu: None, make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangEngine]:
    path = write_model(
        tmp_path_factory.mktemp("tools"), "llama", tie_word_embeddings=True, max_position_embeddings=2048
    )
    write_marked(path)
    model = make_config().model.model_dump() | {"source": str(path)}
    made = SglangEngine(make_config(model=model, sglang=PARSERS), start_timeout_s=SOON_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


async def ask(engine: SglangEngine, sampling: SamplingParams, **fields: Any) -> list[Chunk]:
    request = GenerateRequest(f"r{id(sampling)}", sampling, messages=USER, **fields)
    async with asyncio.timeout(SOON_S):
        return [chunk async for chunk in engine.submit(request)]


def calls_of(chunks: list[Chunk], index: int = 0) -> list[tuple[str, Any]]:
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for entry in (chunk.delta or {}).get("tool_calls", ()) if chunk.index == index else ():
            call = found.setdefault(entry["index"], [entry["function"].get("name"), ""])
            call[1] += entry["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def last(chunks: list[Chunk], index: int = 0) -> Chunk:
    (end,) = [chunk for chunk in chunks if chunk.finish_reason is not None and chunk.index == index]
    return end


def test_it_says_what_it_has(engine: SglangEngine) -> None:
    assert (engine.info().tools, engine.info().reasoning, engine.info().grammars) == (True, False, True)


@pytest.mark.parametrize("named", [None, "second"])
async def test_a_call_that_must_come_comes(engine: SglangEngine, named: str | None) -> None:
    sampling = SamplingParams(max_tokens=600, temperature=1.0, n=2)
    fields: dict[str, Any] = {"tools": (pick("first"), pick("second")), "parallel_tool_calls": False}
    chunks = await ask(engine, sampling, tool_choice="required", named_tool=named, **fields)
    for index in range(2):
        ((name, arguments),) = calls_of(chunks, index)
        assert name in (("first", "second") if named is None else (named,))
        assert arguments["n"] in (1, 2) and isinstance(arguments["sure"], bool)
        end = last(chunks, index)
        assert end.finish_reason == "tool_calls" and end.usage is not None and end.usage.reasoning_tokens is None
    assert not "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"tool_choice": "required", "emitted": (5,)}, Unsupported, "emitted"),
        ({"tools": (pick("first", {"not": {"type": "null"}}),), "tool_choice": "required"}, InvalidRequest, "tools"),
    ],
)
async def test_a_refusal_names_the_tools(
    engine: SglangEngine, fields: dict[str, Any], error: type[Exception], param: str
) -> None:
    with pytest.raises(error) as caught:
        await ask(engine, SamplingParams(max_tokens=4), **{"tools": (pick("first"),), **fields})
    assert caught.value.param == param  # type: ignore[attr-defined]


async def test_the_prompt_that_is_counted_has_the_tools(engine: SglangEngine) -> None:
    def asked(**fields: Any) -> GenerateRequest:
        return GenerateRequest("t", SamplingParams(), messages=USER, **fields)

    assert len(await engine.tokenize(asked(tools=(pick("first"),)))) > len(await engine.tokenize(asked())) + 100
