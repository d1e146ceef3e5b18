"""The embedded engine on a GPU: graph replay gives the tokens of eager runs, and is what really happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from serve_app.config import Config, load_config
from tests.engines.local.conftest import write_drafter, write_model
from tests.engines.local.helpers import collect, request, running

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    model = write_model(tmp_path_factory.mktemp("model"), "qwen3")
    drafter = write_drafter(tmp_path_factory.mktemp("drafter"))

    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, Any] = {
            "model": {"source": str(model), "drafter": str(drafter), "dtype": "float32", "device": "cuda"},
            "engine": {"max_running": 4, "prefill_chunk": 32},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        return load_config(tree, use_env=False)

    return make


async def answers(made: Config, registry: CollectorRegistry | None = None) -> list[list[int]]:
    """Mixed lengths and temperatures, so that batches of every size occur."""
    async with running(made, registry) as engine:
        wanted = [
            request("y" * (1 + 17 * n % 90), max_tokens=10 + 9 * n, temperature=n % 2, seed=n, ignore_eos=True)
            for n in range(9)
        ]
        return [answer.tokens for answer in await asyncio.gather(*(collect(engine, one) for one in wanted))]


@pytest.mark.parametrize("speculation", [{"method": "none"}, {"method": "chain"}, {"budget": 12}, {"budget": "auto"}])
async def test_graphs_and_eager_give_the_same_tokens(
    config: Callable[..., Config], speculation: dict[str, Any]
) -> None:
    eager = await answers(config(speculation=speculation, engine={"cuda_graphs": False}))
    assert await answers(config(speculation=speculation)) == eager
    assert await answers(config(speculation={"method": "none"}, engine={"cuda_graphs": False})) == eager


async def test_only_prefill_runs_eagerly(config: Callable[..., Config]) -> None:
    registry = CollectorRegistry()
    await answers(config(), registry)
    labels = {"model": "smollm2-135m"}
    fallbacks = {
        (sample.labels["role"], sample.labels["reason"])
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "ddtree_graph_fallbacks_total" and sample.value
    }
    assert fallbacks == {("target", "mode_not_graphable")}
    for role in ("target", "draft"):
        assert registry.get_sample_value("ddtree_graph_replays_total", {**labels, "role": role})
