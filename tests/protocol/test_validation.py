"""Which field an error names, and that every field of the API is honoured or refused."""

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from serve_app.errors import InvalidRequest, Unsupported
from serve_app.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, validate

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
SECRET = "do-not-echo-me"
MANY = {f"k{number}": [] for number in range(1000)}

WRONG_CHAT = [
    ({"messages": {"role": "user", "content": SECRET}}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [SECRET]}, "messages[0]"),
    ({"messages": [{"content": SECRET}]}, "messages[0].role"),
    ({"messages": [{"role": SECRET, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": SECRET}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", SECRET: 1}]}, f"messages[0].{SECRET}"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].type"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"logit_bias": {SECRET: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": True}, "stream_options"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"chat_template_kwargs": {"x": [SECRET]}}, "chat_template_kwargs"),
    ({"metadata": {"x": 1}}, "metadata"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"frobnicate": SECRET}, "frobnicate"),
    ({"Frob nicate": SECRET}, None),
]
UNSUPPORTED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "v", "format": "wav"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"verbosity": "low"}, "verbosity"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
]
HARMLESS_CHAT: dict[str, Any] = {
    "tools": [],
    "functions": [],
    "tool_choice": "auto",
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "medium",
    "service_tier": "auto",
    "store": False,
    "user": "u",
    "metadata": {"k": "v"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
}
WRONG_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"x": SECRET}}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1, SECRET]}, "prompt[0]"),
    ({"prompt": [[1], [True]]}, "prompt[1][0]"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 0}, "best_of"),
    ({"messages": [USER]}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), WRONG_CHAT)
def test_a_wrong_chat_field_is_named_and_its_value_never_quoted(change: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatRequest, CHAT | change)
    assert caught.value.param == param
    assert SECRET not in caught.value.message.replace(param or "-", "")


@pytest.mark.parametrize(("change", "param"), WRONG_TEXT)
def test_a_wrong_completion_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(CompletionRequest, TEXT | change)
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatRequest, {key: value for key, value in CHAT.items() if key != field})
    assert (caught.value.param, caught.value.message) == (field, f"{field} is required.")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop must have at most 4 items"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must have at least 1 item"),
        ({"stop": {}}, "stop must be a valid string or must be a valid list"),
        ({"Frob nicate": SECRET}, "The request body has an unknown parameter"),
    ],
)
def test_the_reason_is_that_of_the_type_which_was_sent(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatRequest, CHAT | change)
    assert caught.value.message.startswith(reason)


@pytest.mark.parametrize(
    ("model", "field", "value", "at"),
    [
        (ChatRequest, "messages", [5], "messages[0]"),
        (
            ChatRequest,
            "messages",
            [{"role": "user", "content": [{"type": "text"}] * 1000}],
            "messages[0].content[0].text",
        ),
        (
            ChatRequest,
            "messages",
            [{"role": "assistant", "content": [{"type": "x"}] * 1000}],
            "messages[0].content[0].type",
        ),
        (CompletionRequest, "prompt", [""], "prompt[0]"),
        (CompletionRequest, "prompt", [[-1]], "prompt[0][0]"),
        (TokenizeRequest, "messages", [5], "messages[0]"),
        (DetokenizeRequest, "tokens", [-1], "tokens[0]"),
        (ChatRequest, "metadata", MANY, "metadata"),
        (ChatRequest, "logit_bias", MANY, "logit_bias"),
        (ChatRequest, "chat_template_kwargs", MANY, "chat_template_kwargs"),
    ],
)
def test_of_many_wrong_items_few_are_found(model: Any, field: str, value: Any, at: str) -> None:
    """What is found grows with the body, and what is done with it: seconds, in which the process does nothing else."""
    body = {"model": "m", "messages": [USER], field: value * 1000 if isinstance(value, list) else value}
    with pytest.raises(InvalidRequest) as caught:
        validate(model, body)
    assert caught.value.param == at
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() < 10


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        (MANY, "k0"),
        ({"messages": [USER | MANY]}, "messages[0].k0"),
        ({"stream_options": {"include_usage": True} | MANY}, "stream_options.k0"),
        ({"tools": [{"type": "function", "function": {"name": "f"} | MANY}]}, "tools[0].function.k0"),
    ],
)
def test_of_many_unknown_keys_the_first_is_found(fields: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatRequest, CHAT | fields)
    assert (caught.value.param, caught.value.message) == (at, f"{at} is not a known parameter.")
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(CHAT | fields)
    assert found.value.error_count() == 1


@pytest.mark.parametrize(("change", "param"), UNSUPPORTED_CHAT)
def test_what_is_not_offered_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        validate(ChatRequest, CHAT | change)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "change",
    [
        {"echo": True},
        {"echo": 0.0},
        {"suffix": "x"},
        {"store": True},
        {"service_tier": "priority"},
        {"moderation": {"model": "m"}},
        {"prompt_cache_options": {"mode": "explicit"}},
        {"prompt_cache_retention": "24h"},
    ],
)
def test_what_completions_do_not_offer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        validate(CompletionRequest, TEXT | change)
    assert caught.value.param == next(iter(change))


@pytest.mark.parametrize(("field", "value"), HARMLESS_CHAT.items())
def test_values_that_change_nothing_are_accepted(field: str, value: Any) -> None:
    validate(ChatRequest, CHAT | {field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"store": False},
        {"metadata": {}},
        {"metadata": {"k": "v"}},
        {"service_tier": "default"},
        {"safety_identifier": "s"},
        {"prompt_cache_key": "k"},
        {"user": "u"},
        {"echo": False},
        {"suffix": ""},
    ],
)
def test_what_says_nothing_of_a_completion_is_accepted(change: dict[str, Any]) -> None:
    validate(CompletionRequest, TEXT | change)


def test_roles_are_read_in_any_case() -> None:
    wire = validate(ChatRequest, CHAT | {"messages": [{"role": "User", "content": "hi"}]})
    assert wire.messages[0].role == "user"


def test_an_assistant_message_may_lack_content() -> None:
    validate(ChatRequest, CHAT | {"messages": [USER, {"role": "assistant"}]})


@pytest.mark.parametrize(
    ("model", "client"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_client_is_known(model: Any, client: Any) -> None:
    assert set(client.__annotations__) - set(model.model_fields) == set()


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({SECRET: 1}, "logit_bias has a key that is no token id."),
        ({"5": 101}, "logit_bias has a value that must be less than or equal to 100."),
        ({"5": "1"}, "logit_bias has a value that must be a valid number."),
        ([], "logit_bias must be a valid dictionary."),
    ],
)
def test_what_is_wrong_with_a_bias_is_told_in_words(bias: object, said: str) -> None:
    """Its keys are the client's, and are not told back."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logit_bias": bias}
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatRequest, body)
    assert (caught.value.message, caught.value.param) == (said, "logit_bias")
