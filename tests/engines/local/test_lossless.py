"""Speculation changes nothing but the number of steps: same tokens, text, stops and usage as plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_app.engines.base import Chunk, SamplingParams
from serve_app.metrics import EngineMetrics
from tests.engines.local.oracle import BLOCK, CONTEXT, Rig, text, tokens

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "penalised-sampled": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "biased": {"temperature": 0, "logit_bias": {40: 6.0, 41: 5.5, 2: 3.0}},
    "min-tokens": {"temperature": 1.0, "logit_bias": {2: 12.0}, "min_tokens": 9},
}  # fmt: skip

Requests = list[tuple[tuple[int, ...], SamplingParams]]


def requests(kind: str, **more: Any) -> Requests:
    rng = random.Random(kind)
    made = []
    for number in range(7):
        prompt = tuple(rng.randrange(3, 259) for _ in range(rng.choice([1, 3, 17, 40, 70])))
        options = {**KINDS[kind], "max_tokens": rng.choice([1, 2, 30, 45]), "seed": number, **more}
        made.append((prompt, SamplingParams(**options)))
    return made


def plain(model: Path, wanted: Requests) -> tuple[dict[tuple[int, ...], list[int]], list[list[Chunk]]]:
    chunks = Rig(model, slots=2).run(wanted)
    return {prompt: tokens(done) for (prompt, _), done in zip(wanted, chunks, strict=True)}, chunks


def outcome(chunks: list[Chunk]) -> tuple[Any, ...]:
    last = chunks[-1]
    return tokens(chunks), text(chunks), last.finish_reason, last.stop_reason, last.usage


@pytest.mark.parametrize("budget", [0, 3, 12, 40])
@pytest.mark.parametrize("kind", list(KINDS))
def test_same_outcome_as_plain_decoding(tiny: Path, kind: str, budget: int) -> None:
    wanted = requests(kind)
    truth, expected = plain(tiny, wanted)
    rig = Rig(tiny, truth, budget)
    assert [outcome(chunks) for chunks in rig.run(wanted)] == [outcome(chunks) for chunks in expected]


def test_drafts_really_were_accepted(tiny: Path) -> None:
    wanted = requests("greedy", max_tokens=45)
    truth, _ = plain(tiny, wanted)
    rig = Rig(tiny, truth, 12, slots=1)
    rig.run(wanted)
    assert sum(map(len, truth.values())) / rig.steps > 1.5


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_a_stop_string_cuts_the_same_place(tiny: Path, kind: str) -> None:
    wanted = requests(kind, max_tokens=45)
    truth, whole = plain(tiny, wanted)
    stopped = [
        (prompt, replace(params, stop=(text(chunks)[len(text(chunks)) // 2 :][:2] or "x",), logprobs=2))
        for (prompt, params), chunks in zip(wanted, whole, strict=True)
    ]
    _, expected = plain(tiny, stopped)
    got = Rig(tiny, truth, 12).run(stopped)
    for want, have in zip(expected, got, strict=True):
        assert outcome(have) == outcome(want)
        assert have[-1].finish_reason == "stop"
        assert sum(len(chunk.logprobs or ()) for chunk in have) == len(tokens(have))


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - BLOCK, CONTEXT - 14])
def test_the_end_of_the_context_ends_with_length(tiny: Path, length: int) -> None:
    prompt = tuple(random.Random(length).randrange(3, 259) for _ in range(length))
    wanted: Requests = [(prompt, SamplingParams(temperature=0, ignore_eos=True))]
    truth, expected = plain(tiny, wanted)
    [got] = Rig(tiny, truth, 40).run(wanted)
    assert outcome(got) == outcome(expected[0])
    assert got[-1].finish_reason == "length"
    assert len(tokens(got)) == CONTEXT - length


def test_metrics_add_up_to_the_tokens_delivered(tiny: Path) -> None:
    wanted = requests("greedy")
    truth, _ = plain(tiny, wanted)
    registry = CollectorRegistry()
    rig = Rig(tiny, truth, 12, metrics=EngineMetrics(registry, "m", BLOCK, ["no_cuda"]))
    done = rig.run(wanted)

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, {"model": "m", **labels}) or 0.0

    delivered = sum(len(tokens(chunks)) for chunks in done)
    verified = value("ddtree_emitted_tokens_total", phase="verify")
    assert verified == value("ddtree_acceptance_length_sum")
    assert verified + value("ddtree_emitted_tokens_total", phase="prefill") == delivered
    assert verified == value("ddtree_accepted_tokens_total") + value("ddtree_bonus_tokens_total")
    assert value("ddtree_tree_nodes_total") == 12 * value("ddtree_verify_steps_total")
    assert value("ddtree_prefill_tokens_total") == sum(len(prompt) for prompt, _ in wanted)
    ended = [value("ddtree_requests_total", outcome=outcome) for outcome in ("stop", "length")]
    assert sum(ended) == len(wanted)
    assert value("ddtree_running_requests") == value("ddtree_kv_tokens_used") == 0
