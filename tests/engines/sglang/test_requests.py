"""What is refused for which algorithm, and a request in SGLang's words."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.engines.sglang.requests import Offer, generation, refuse, sampling_params
from serve_app.errors import Unsupported
from tests.conftest import require_sglang

GRAMMAR = Offer("DDTREE", False, grammars=True)
PLAIN, TREE, CHAIN = (Offer(algorithm, False, False) for algorithm in (None, "DDTREE", "DFLASH"))


def wanted(emitted: tuple[int, ...] = (), **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", SamplingParams(**sampling), prompt="x", emitted=emitted)


@pytest.mark.parametrize(
    ("offer", "sampling", "param"),
    [
        (TREE, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (TREE, {"presence_penalty": 0.5}, "presence_penalty"),
        (TREE, {"min_tokens": 2}, "min_tokens"),
        (CHAIN, {"logprobs": 0}, "logprobs"),
        (CHAIN, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAIN, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAIN, {"min_tokens": 2}, "min_tokens"),
        (CHAIN, {"min_p": 0.1}, "min_p"),
        (CHAIN, {"seed": 3}, "seed"),
        (PLAIN, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (PLAIN, {"seed": 3}, "seed"),
        (PLAIN, {"logprobs": 1, "logit_bias": {3: 1.0}}, "logprobs"),
        (PLAIN, {"presence_penalty": 0.5, "emitted": (4,)}, "emitted"),
        (PLAIN, {"json_schema": "{}"}, "response_format"),
        (GRAMMAR, {"json_schema": "{}", "emitted": (4,)}, "emitted"),
    ],
)
def test_what_cannot_be_done_is_refused(offer: Offer, sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        refuse(wanted(**sampling), offer)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("offer", "sampling"),
    [
        (TREE, {"logprobs": 5, "stop": ("a",), "top_k": 3, "min_p": 0.1, "emitted": (4,)}),
        (TREE, {"logit_bias": {3: 1.0}}),
        (CHAIN, {"logit_bias": {3: 1.0}, "top_k": 3, "top_p": 0.9}),
        (CHAIN, {"seed": 3, "min_p": 0.1, "temperature": 0}),
        (PLAIN, {"frequency_penalty": 1.0, "min_tokens": 3}),
        (PLAIN, {"seed": 3, "temperature": 0}),
        (Offer("DDTREE", True, False), {"seed": 3}),
        (GRAMMAR, {"json_schema": "{}"}),
    ],
)
def test_what_can_be_done_is_not(offer: Offer, sampling: dict[str, Any]) -> None:
    refuse(wanted(**sampling), offer)


def test_stops_wait_for_the_minimum() -> None:
    """SGLang would end at a stop string before it."""
    assert "stop" not in sampling_params(SamplingParams(stop=("a",), min_tokens=2), 9, None)
    assert sampling_params(SamplingParams(stop=("a",)), 9, None)["stop"] == ["a"]


def test_a_seed_is_sent_where_there_is_one() -> None:
    assert "sampling_seed" not in sampling_params(SamplingParams(), 9, None)
    assert sampling_params(SamplingParams(), 9, 7)["sampling_seed"] == 7


def test_only_the_answers_logprobs_are_asked_for() -> None:
    assert "return_logprob" not in generation("r", [1], {}, None)
    asked = generation("r", [1], {}, 0)
    assert (asked["return_logprob"], asked["logprob_start_len"], asked["top_logprobs_num"]) == (True, -1, 0)


def test_sglang_knows_every_field() -> None:
    require_sglang()
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams as Theirs

    asked = sampling_params(SamplingParams(stop=("a",), logit_bias={1: 1.0}, json_schema="{}"), 9, 7)
    assert set(asked) <= set(Theirs.__struct_fields__)
    assert set(generation("r", [1], asked, 2)) | {"log_metrics"} <= set(GenerateReqInput.__dataclass_fields__)
