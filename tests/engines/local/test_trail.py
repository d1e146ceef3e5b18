"""What the engine says about a finished choice, for traces, and about its steps' time."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from serve_app.config import Config
from serve_app.engines.base import Trail
from serve_app.metrics import PHASES
from tests.engines.local.helpers import collect, request, running

Make = Callable[..., Config]
MODEL = "smollm2-135m"  # the default name


async def finished(make_config: Make, registry: CollectorRegistry | None = None) -> Trail:
    async with running(make_config(), registry) as engine:
        answer = await collect(engine, request("hello", max_tokens=20, ignore_eos=True))
    assert [chunk.trail for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)
    assert answer.last.trail is not None
    return answer.last.trail


async def test_its_times_follow_each_other(make_config: Make) -> None:
    trail = await finished(make_config)
    assert trail.admitted_ns is not None and trail.first_token_ns is not None
    assert trail.queued_ns <= trail.admitted_ns < trail.first_token_ns < trail.finished_ns


async def test_its_steps_are_those_that_the_metrics_count(make_config: Make) -> None:
    registry = CollectorRegistry()
    trail = await finished(make_config, registry)
    # Health probes end with their prefill.
    names = ("ddtree_verify_steps_total", "ddtree_tree_nodes_total")
    counted = [registry.get_sample_value(name, {"model": MODEL}) for name in names]
    assert [trail.steps, trail.nodes] == counted == [trail.steps, 12 * trail.steps]


async def test_without_graphs_every_forward_is_eager(make_config: Make) -> None:
    trail = await finished(make_config)
    # One prefill; a draft and a verify for each step.
    assert trail.eager_forwards == 1 + 2 * trail.steps


@pytest.mark.parametrize("phase", PHASES)
async def test_every_phase_of_a_step_is_timed(make_config: Make, phase: str) -> None:
    registry = CollectorRegistry()
    await finished(make_config, registry)
    labels = {"model": MODEL, "phase": phase}
    assert registry.get_sample_value("ddtree_step_seconds_total", labels) > 0  # type: ignore[operator]
