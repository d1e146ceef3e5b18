"""Wire models → jobs: precedence, defaults, and what needs the model's facts."""

from dataclasses import replace
from typing import Any

import pytest

from serve_app.engines.base import ModelInfo, SamplingParams
from serve_app.engines.local.limits import bounded_tokens
from serve_app.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from serve_app.protocol import (
    ChatRequest,
    CompletionRequest,
    Job,
    TokenizeRequest,
    chat_job,
    completion_job,
    tokenize_request,
    validate,
)

INFO = ModelInfo(id="m", max_model_len=100, vocab_size=50, created=1)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def make_chat(**fields: Any) -> Job:
    wire = validate(ChatRequest, {"model": "m", "messages": [USER], **fields})
    return chat_job(wire, INFO, max_choices=4, max_messages=3)


def make_text(**fields: Any) -> Job:
    wire = validate(CompletionRequest, {"model": "m", "prompt": "hi", **fields})
    return completion_job(wire, INFO, max_choices=4, max_prompts=3)


def test_absent_fields_take_openais_defaults() -> None:
    assert make_chat().requests[0].sampling == SamplingParams()


def test_completions_stop_after_sixteen_tokens_unless_told() -> None:
    assert make_text().requests[0].sampling.max_tokens == 16


def test_every_sampling_field_reaches_the_engine() -> None:
    sampling = make_chat(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=3, repetition_penalty=1.5, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"4": 2}, stop="x", stop_token_ids=[5], ignore_eos=True, min_tokens=2,
        logprobs=True, top_logprobs=3, n=2, max_tokens=9,
    ).requests[0].sampling  # fmt: skip
    assert sampling == SamplingParams(
        max_tokens=9, temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=3, repetition_penalty=1.5,
        presence_penalty=1, frequency_penalty=-1, logit_bias={4: 2.0}, stop=("x",), stop_token_ids=(5,),
        ignore_eos=True, min_tokens=2, logprobs=3, n=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "names", [("max_tokens",), ("max_completion_tokens",), ("max_tokens", "max_completion_tokens")]
)
def test_either_name_limits_the_tokens(names: tuple[str, ...]) -> None:
    assert make_chat(**dict.fromkeys(names, 7)).requests[0].sampling.max_tokens == 7


@pytest.mark.parametrize(("names", "said"), [
    (("max_tokens",), "max_tokens"),
    (("max_completion_tokens",), "max_completion_tokens"),
    (("max_tokens", "max_completion_tokens"), "max_tokens"),
])  # fmt: skip
def test_a_limit_that_does_not_fit_is_named_as_the_request_does(names: tuple[str, ...], said: str) -> None:
    (request,) = make_chat(**dict.fromkeys(names, 7)).requests
    with pytest.raises(ContextLengthExceeded) as caught:
        bounded_tokens(request, prompt=4, context=10)
    assert caught.value.param == said and f"{said} is 7" in caught.value.message


def test_names_of_the_limit_that_disagree_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_chat(max_tokens=7, max_completion_tokens=8)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"messages": [USER] * 4}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 101}, "min_tokens"),
        ({"stop_token_ids": [1, 50]}, "stop_token_ids[1]"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}, "strict": True}},
            '{"enum": [1]}',
        ),
    ],
)
def test_a_response_format_is_the_engines_json_schema(wanted: dict[str, Any], schema: str | None) -> None:
    wire = validate(ChatRequest, {"model": "m", "messages": [USER], "response_format": wanted})
    job = chat_job(wire, replace(INFO, grammars=True), max_choices=4, max_messages=4)
    assert job.requests[0].sampling.json_schema == schema


def test_a_schema_too_deep_to_be_written_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"not": schema}
    wire = ChatRequest.model_validate(
        {"model": "m", "messages": [USER],
         "response_format": {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}}
    )  # fmt: skip
    with pytest.raises(InvalidRequest) as caught:
        chat_job(wire, replace(INFO, grammars=True), max_choices=4, max_messages=3)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_response_format_without_grammars_is_refused(kind: str) -> None:
    more = {"json_schema": {"name": "x", "schema": {}}} if kind == "json_schema" else {}
    with pytest.raises(Unsupported) as caught:
        make_chat(response_format={"type": kind, **more})
    assert caught.value.param == "response_format"


def test_one_alternative_is_no_alternative_but_zero_is_allowed() -> None:
    assert make_chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert make_chat(logprobs=False).requests[0].sampling.logprobs is None


def test_a_nucleus_of_zero_is_never_empty() -> None:
    assert 0 < make_chat(top_p=0).requests[0].sampling.top_p < 1e-3


def test_top_k_minus_one_is_off() -> None:
    assert make_chat(top_k=-1).requests[0].sampling.top_k == 0


def test_content_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert make_chat(messages=[{"role": "user", "content": parts}]).requests[0].messages == (
        {"role": "user", "content": "ab"},
    )


def test_a_turn_of_tool_calls_is_plain_data() -> None:
    job = make_chat(
        messages=[
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "c1"},
        ]
    )
    assert job.requests[0].messages == (
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [(1, 2)]),
        ([[1], [2, 3]], [None, None], [(1,), (2, 3)]),
    ],
)
def test_prompts_of_every_shape(prompt: Any, texts: list[Any], ids: list[Any]) -> None:
    requests = make_text(prompt=prompt).requests
    assert ([r.prompt for r in requests], [r.prompt_token_ids for r in requests]) == (texts, ids)


def test_request_ids_differ_between_prompts_and_requests() -> None:
    ids = [r.request_id for _ in range(2) for r in make_text(prompt=["a", "b"]).requests]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([1, 50], "prompt[1]"), ([[1], [2, 99]], "prompt[1][1]"), (["a"] * 4, "prompt")],
)
def test_prompts_beyond_the_model_or_the_limit_are_refused(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_text(prompt=prompt)
    assert caught.value.param == param


def test_best_of_may_only_repeat_n() -> None:
    assert make_text(n=2, best_of=2).requests[0].sampling.n == 2
    with pytest.raises(Unsupported) as caught:
        make_text(best_of=3)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize("fields", [{}, {"prompt": "x", "messages": [USER]}])
def test_tokenize_takes_exactly_one_input(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        tokenize_request(validate(TokenizeRequest, fields), INFO, max_messages=9)


def test_a_chat_that_is_only_counted_is_bounded_as_one_that_is_answered() -> None:
    wire = validate(TokenizeRequest, {"messages": [USER] * 3})
    tokenize_request(wire, INFO, max_messages=3)
    with pytest.raises(InvalidRequest) as refused:
        tokenize_request(wire, INFO, max_messages=2)
    assert refused.value.param == "messages"


def test_prompts_times_n_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_text(prompt=["a", "b"], n=4)
    assert refused.value.param == "n"
