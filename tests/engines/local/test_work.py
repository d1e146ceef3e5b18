"""What the engine says about a finished choice, for traces, and about its steps' time."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from serve_app.config import Config
from serve_app.engines.base import Work
from serve_app.metrics import PHASES
from tests.engines.local.helpers import collect, request, running

Make = Callable[..., Config]


async def finished(make_config: Make, registry: CollectorRegistry | None = None) -> Work:
    async with running(make_config(), registry) as engine:
        answer = await collect(engine, request("hello", max_tokens=20, ignore_eos=True))
    assert [chunk.work for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)
    assert answer.last.work is not None
    return answer.last.work


async def test_its_times_follow_each_other(make_config: Make) -> None:
    work = await finished(make_config)
    assert work.admitted_ns is not None and work.first_token_ns is not None
    assert work.queued_ns <= work.admitted_ns < work.first_token_ns < work.finished_ns


async def test_its_steps_are_those_that_the_metrics_count(make_config: Make) -> None:
    registry = CollectorRegistry()
    work = await finished(make_config, registry)
    # Health probes end with their prefill.
    assert work.steps == registry.get_sample_value("ddtree_verify_steps_total", {"model": "smollm2-135m"})
    assert (
        work.nodes == registry.get_sample_value("ddtree_tree_nodes_total", {"model": "smollm2-135m"}) == 12 * work.steps
    )


async def test_without_graphs_every_forward_is_eager(make_config: Make) -> None:
    work = await finished(make_config)
    # One prefill; a draft and a verify for each step.
    assert work.eager_forwards == 1 + 2 * work.steps


@pytest.mark.parametrize("phase", PHASES)
async def test_every_phase_of_a_step_is_timed(make_config: Make, phase: str) -> None:
    registry = CollectorRegistry()
    await finished(make_config, registry)
    labels = {"model": "smollm2-135m", "phase": phase}
    assert registry.get_sample_value("ddtree_step_seconds_total", labels) > 0  # type: ignore[operator]
