"""Reasoning over a real SGLang, tools beside it: what is told apart, and that it goes on elsewhere."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve_app.config import Config
from serve_app.engines.base import Chunk, SamplingParams
from serve_app.engines.sglang.engine import SglangEngine
from tests.engines.local.conftest import write_model
from tests.engines.sglang.parsers import write_marked
from tests.engines.sglang.test_tools_engine import PARSERS, SOON_S, ask, last, pick


@pytest.fixture(scope="module")
def engine(
    sglang_on_cpu: None, make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangEngine]:
    path = write_model(
        tmp_path_factory.mktemp("reasoning"), "llama", tie_word_embeddings=True, max_position_embeddings=2048
    )
    write_marked(path)
    model = make_config().model.model_dump() | {"source": str(path)}
    made = SglangEngine(
        make_config(model=model, sglang={**PARSERS, "reasoning_parser": "qwen3"}), start_timeout_s=SOON_S
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


def test_it_says_what_it_has(engine: SglangEngine) -> None:
    """SGLang cannot make a grammar wait for the end of reasoning with this backend, and fails at every grammar."""
    assert (engine.info().tools, engine.info().reasoning, engine.info().grammars) == (True, True, False)


async def test_reasoning_is_told_apart(engine: SglangEngine) -> None:
    chunks = await ask(engine, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    reasoning = "".join((chunk.delta or {}).get("reasoning_content", "") for chunk in chunks)
    plain = await ask(engine, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), separate_reasoning=False)
    assert reasoning == "".join(chunk.text for chunk in plain) and not any(chunk.text for chunk in chunks)


async def test_an_answer_goes_on_behind_another_engines_tokens(engine: SglangEngine) -> None:
    fields: dict[str, Any] = {"tools": (pick("first"),)}
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    whole = await ask(engine, sampling, **fields)
    tokens = [token for chunk in whole for token in chunk.token_ids]

    def told(chunks: list[Chunk]) -> tuple[str, str]:
        reasoning = "".join((chunk.delta or {}).get("reasoning_content", "") for chunk in chunks)
        return reasoning, "".join(chunk.text for chunk in chunks)

    for cut in (1, 7, 23):
        rest = await ask(engine, sampling, emitted=tuple(tokens[:cut]), **fields)
        seen, at = [], 0
        for chunk in whole:
            if at + len(chunk.token_ids) <= cut:
                seen.append(chunk)
            at += len(chunk.token_ids)
        assert [token for chunk in rest for token in chunk.token_ids] == tokens[cut:]
        parts = [told(part) for part in (seen, rest, whole)]
        assert (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]) == parts[2]
        counts = [
            (end.usage.completion_tokens, end.usage.reasoning_tokens) for end in (last(rest), last(whole)) if end.usage
        ]
        assert len(counts) == 2 and counts[0] == counts[1]
