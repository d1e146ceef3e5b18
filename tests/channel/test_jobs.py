"""A job comes out as it went in, and a stranger's bytes are refused."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel.jobs import job_of, pack_job
from serve_app.channel.wire import ChannelError
from serve_app.engines.base import GenerateRequest, SamplingParams, Usage
from serve_app.protocol import Job, Origin, Progress

# What JSON and msgpack have in common: no halves of surrogate pairs, 64 bits.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
COUNT = st.integers(0, 2**40)
IDS = st.lists(COUNT, max_size=3).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | COUNT,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(COUNT, st.floats(-100, 100), max_size=3),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=IDS,
    logprobs=st.none() | st.integers(0, 20),
    json_schema=st.none() | TEXT,
    n=st.integers(1, 4),
)
REQUEST = st.builds(
    GenerateRequest,
    request_id=TEXT,
    sampling=SAMPLING,
    prompt=st.none() | TEXT,
    prompt_token_ids=st.none() | IDS,
    messages=st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3).map(tuple),
    tools=st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3).map(tuple),
    chat_template_kwargs=st.dictionaries(TEXT, JSON, max_size=3),
    tool_choice=st.sampled_from(["auto", "required"]),
    named_tool=st.none() | TEXT,
    parallel_tool_calls=st.booleans(),
    reasoning_effort=st.none() | TEXT,
    separate_reasoning=st.booleans(),
    emitted=IDS,
)
PROGRESS = st.builds(
    Progress,
    COUNT,
    IDS,
    st.booleans(),
    st.none() | st.builds(Usage, COUNT, COUNT, COUNT, st.none() | COUNT),
    st.none() | st.tuples(COUNT, st.binary(max_size=3)),
)
JOBS = st.builds(
    Job,
    id=TEXT,
    created=COUNT,
    model=TEXT,
    chat=st.booleans(),
    stream=st.booleans(),
    include_usage=st.booleans(),
    requests=st.lists(REQUEST, min_size=1, max_size=3).map(tuple),
    origin=st.builds(Origin, TEXT, st.dictionaries(TEXT, TEXT, max_size=2), COUNT),
    sent=st.lists(st.none() | PROGRESS, max_size=3).map(tuple),
    session=TEXT,
    shunned=st.frozensets(TEXT, max_size=3),
)
JOB = Job("id", 1, "m", True, True, False, (GenerateRequest("r", SamplingParams(), prompt="x"),))


@given(JOBS)
def test_a_job_comes_out_as_it_went_in(job: Job) -> None:
    assert job_of(pack_job(job)) == job


@pytest.mark.parametrize("prompt", ["\ud800", 2**64])
def test_what_has_no_plain_form_is_said_to_have_none(prompt: Any) -> None:
    job = replace(JOB, requests=(replace(JOB.requests[0], prompt=prompt),))
    with pytest.raises((ValueError, TypeError, OverflowError)):
        pack_job(job)


@given(st.binary(max_size=200))
def test_a_strangers_bytes_are_a_job_or_refused(noise: bytes) -> None:
    with contextlib.suppress(ChannelError):
        assert isinstance(job_of(noise), Job)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_job_that_ends_too_soon_is_refused(cut: int) -> None:
    with pytest.raises(ChannelError):
        job_of(pack_job(JOB)[:-cut])
