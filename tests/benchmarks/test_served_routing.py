"""What `benchmarks/served_routing.py` adds up, and the engine that it measures, without a cluster."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest

from benchmarks.prefix_cache import TOKENS_PER_BLOCK, BlockCache
from benchmarks.ray_prefix_router import JobPrefixRouter
from benchmarks.served_routing import ROUTERS, CachingEngine, Turn, imbalance, prefill_s, summary
from serve_app.engines.base import Chunk, Engine, GenerateRequest, SamplingParams
from serve_app.protocol import Job


def turn(sent: float, first: float, ended: float, replica: str = "a", cached: int = 0) -> Turn:
    return Turn(sent, first, ended, replica, (first - sent) / 2, prompt_tokens=100, cached_tokens=cached)


def test_a_prompt_is_cached_up_to_the_first_block_that_is_not() -> None:
    cache = BlockCache(10)
    assert (cache.use([1, 2, 3]), cache.use([1, 2, 9, 3]), cache.use([1, 2, 3])) == (0, 2, 3)


def test_the_cache_is_bounded_and_forgets_the_longest_unused() -> None:
    cache = BlockCache(3)
    cache.use([1, 2, 3])
    cache.use([1])
    cache.use([4])
    assert (len(cache), cache.use([2]), cache.use([1])) == (3, 0, 1)


def test_the_busiest_replica_is_compared_with_the_mean_of_all_of_them() -> None:
    turns = [turn(0, 1, 9), turn(1, 2, 5), turn(2, 3, 9), turn(3, 4, 9, "b")]
    assert imbalance(turns, 3, 4) == 3
    # One has ended, and the last has not yet begun.
    assert (imbalance(turns, 5, 4), imbalance(turns, 2.5, 2)) == (8 / 3, 2)


def test_what_met_cold_caches_counts_only_as_load() -> None:
    cold, counted = turn(0, 50, 100, "a", cached=0), turn(10, 10.25, 11, "b", cached=75)
    found = summary([([cold, counted], 10)], 2)
    assert found == {
        "requests": 1, "hit_rate": 0.75, "ttft_p50_ms": 250, "ttft_p99_ms": 250, "engine_p50_ms": 125,
        "engine_p99_ms": 125, "imbalance": 1,
    }  # fmt: skip


def test_rounds_are_added_up_and_do_not_see_each_others_load() -> None:
    one, other = [turn(0, 0.5, 9, "a", cached=20)], [turn(0, 0.25, 9, "b", cached=40)]
    found = summary([(one, 0), (other, 0)], 2)
    assert (found["requests"], found["hit_rate"], found["imbalance"]) == (2, pytest.approx(0.3), 2)
    assert found["ttft_p99_ms"] == 500


def test_a_prompt_costs_time_for_what_is_not_cached() -> None:
    assert prefill_s(250) - prefill_s(0) == pytest.approx(250 * TOKENS_PER_BLOCK / 4000)


async def answer(engine: Any, text: str, tokens: int) -> list[Chunk]:
    request = GenerateRequest("r", SamplingParams(max_tokens=tokens), messages=[{"role": "user", "content": text}])
    return [chunk async for chunk in engine.submit(request)]


async def test_the_engine_says_what_it_had_cached() -> None:
    engine = CachingEngine(None, None)
    assert isinstance(engine, Engine)
    first, second = [await answer(engine, "x" * 640, 6) for _ in range(2)]
    assert [chunk.token_ids for chunk in first] == [(0, 1, 2, 3), (0, 1)]
    assert (first[-1].usage.cached_tokens, second[-1].usage.cached_tokens) == (0, second[-1].usage.prompt_tokens)
    assert engine.stats().running == 0


async def test_an_answer_that_is_given_up_frees_the_engine() -> None:
    engine = CachingEngine(None, None)
    task = asyncio.create_task(answer(engine, "x" * 64000, 6))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.stats().running == 0 and not engine._prefill.locked()


async def test_rays_router_is_shown_the_text_of_a_job_and_nothing_else() -> None:
    router: Any = JobPrefixRouter.__new__(JobPrefixRouter)  # its state is an actor
    messages = [{"role": "system", "content": "be "}, {"role": "user", "content": [{"type": "text", "text": "kind"}]}]
    job = Job("i", 0, "m", True, True, False, (GenerateRequest("r", SamplingParams(), messages=messages),))
    pending = [PendingRequest(args=a, kwargs={}, metadata=RequestMetadata("r", "r")) for a in ([job], [30.0, 5.0])]
    assert [router._extract_text_from_request(one) for one in pending] == ["be kind", None]


def test_each_router_has_an_application_of_its_own() -> None:
    assert len({application for application, _ in ROUTERS.values()}) == len(ROUTERS)
