"""Tokens of another engine, continued: what comes behind them is what an undisturbed run says there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.config import Config
from serve_app.errors import InvalidRequest
from tests.engines.local.helpers import collect, request, running

CUTS = (1, 5, 17)
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"min_tokens": 20, "temperature": 1.2, "seed": 2},
    {"logprobs": 2},
]


@pytest.mark.parametrize("method", ["ddtree", "none"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_tokens_text_and_usage_are_those_of_one_run(
    make_config: Callable[..., Config], method: str, sampling: dict[str, Any]
) -> None:
    async with running(make_config(speculation={"method": method})) as engine:
        asked = request("hello there", ignore_eos=True, **sampling)
        whole = await collect(engine, asked)
        for cut in CUTS:
            head = tuple(whole.tokens[:cut])
            rest = await collect(engine, replace(asked, request_id=f"c{cut}", emitted=head))
            assert [*head, *rest.tokens] == whole.tokens
            assert rest.usage == whole.usage
            assert whole.text.endswith(rest.text) and rest.last.finish_reason == whole.last.finish_reason
            numbers = [(entry.token_id, round(entry.logprob, 3)) for entry in rest.logprobs]
            assert numbers == [(e.token_id, round(e.logprob, 3)) for e in whole.logprobs[cut:]]


async def test_a_stop_string_across_the_seam_stops(make_config: Callable[..., Config]) -> None:
    async with running(make_config(speculation={"method": "none"})) as engine:
        asked = request("hello there", ignore_eos=True, logit_bias={70: 100.0}, max_tokens=8)
        text = (await collect(engine, asked)).text
        stop = text[1:5]
        asked = replace(asked, sampling=replace(asked.sampling, stop=(stop, "never")))
        whole = await collect(engine, replace(asked, request_id="whole"))
        for cut in range(1, len(whole.tokens)):
            head = tuple(whole.tokens[:cut])
            rest = await collect(engine, replace(asked, request_id=f"c{cut}", emitted=head))
            assert (rest.last.stop_reason, rest.usage) == (whole.last.stop_reason, whole.usage)


async def test_tokens_that_end_the_text_are_refused(make_config: Callable[..., Config]) -> None:
    async with running(make_config()) as engine:
        asked = request("hello", max_tokens=3, ignore_eos=True)
        whole = await collect(engine, asked)
        with pytest.raises(InvalidRequest):
            await collect(engine, replace(asked, request_id="again", emitted=tuple(whole.tokens)))
