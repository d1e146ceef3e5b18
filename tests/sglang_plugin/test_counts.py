"""What the hooks around SGLang's results count, through the process's real series."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_app.metrics import StepMetrics
from serve_app.sglang_plugin.args import Options

DDTREE = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="DDTREE"))
OTHER = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="DFLASH"))


@pytest.fixture
def registry(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    from serve_app.sglang_plugin import metrics

    made = CollectorRegistry()
    exporter = metrics.Exporter(StepMetrics(made, "m", 6, ["no_runner"]), Options(9, 3, 5))
    monkeypatch.setattr(metrics, "_exporter", exporter)
    return made


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model": "m", **labels})


def request(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(output_ids=list(ids))


@pytest.mark.parametrize("lengths", [None, [7, 5, 4]])
def test_a_prefill_counts_its_prompts_and_the_first_tokens(registry: CollectorRegistry, lengths: Any) -> None:
    from serve_app.sglang_plugin.hooks import prefill_result

    ends, in_the_middle, decoding = request(), request(), request(4)
    batch = SimpleNamespace(reqs=[ends, in_the_middle, decoding], extend_lens=[7, 5, 4])

    def original(processor: Any, batch: Any, result: Any) -> None:
        ends.output_ids.append(3)

    result = SimpleNamespace(extend_input_len_per_req=lengths)
    prefill_result(original, DDTREE, batch, result)
    assert value(registry, "ddtree_prefill_tokens_total") == 16
    assert value(registry, "ddtree_emitted_tokens_total", phase="prefill") == 1
    prefill_result(original, OTHER, batch, result)
    assert value(registry, "ddtree_prefill_tokens_total") == 16, "another algorithm's are not ours to count"


def test_phases_add_up(registry: CollectorRegistry) -> None:
    from serve_app.sglang_plugin import metrics

    for seconds in (0.25, 0.5):
        metrics.phase("verify", seconds)
    metrics.settle()
    assert value(registry, "ddtree_step_seconds_total", phase="verify") == 0.75
    assert value(registry, "ddtree_step_seconds_total", phase="draft") == 0
