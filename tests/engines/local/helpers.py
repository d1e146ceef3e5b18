"""Drives an engine in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry

from serve_app.config import Config
from serve_app.engines.base import Chunk, GenerateRequest, SamplingParams, TokenLogprob, Usage
from serve_app.engines.local.engine import LocalEngine

_ids = count()


@asynccontextmanager
async def running(config: Config, registry: CollectorRegistry | None = None) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(config, registry)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request(prompt: str | tuple[int, ...] = "hello", **sampling: Any) -> GenerateRequest:
    """A request with a fresh id; keyword arguments are sampling parameters."""
    sampling.setdefault("max_tokens", 24)
    sampling.setdefault("temperature", 0)
    params = SamplingParams(**sampling)
    if isinstance(prompt, str):
        return GenerateRequest(f"r{next(_ids)}", params, prompt=prompt)
    return GenerateRequest(f"r{next(_ids)}", params, prompt_token_ids=prompt)


@dataclass
class Answer:
    """All chunks of one choice, joined."""

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    chunks: list[Chunk]

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def usage(self) -> Usage:
        assert self.last.usage is not None
        return self.last.usage


async def collect(engine: LocalEngine, wanted: GenerateRequest, index: int = 0) -> Answer:
    answer = Answer([], "", [], [])
    async for chunk in engine.submit(wanted):
        if chunk.index == index:
            answer.tokens.extend(chunk.token_ids)
            answer.text += chunk.text
            answer.logprobs.extend(chunk.logprobs or ())
            answer.chunks.append(chunk)
    return answer
