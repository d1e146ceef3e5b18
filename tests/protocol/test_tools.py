"""Tools, the choice among them and reasoning: which field an error names, and what an engine gets."""

from dataclasses import replace
from typing import Any

import pytest

from serve_app.engines.base import GenerateRequest, ModelInfo
from serve_app.errors import InvalidRequest, Unsupported
from serve_app.protocol import ChatRequest, TokenizeRequest, chat_job, parse_object, tokenize_request, validate
from serve_app.protocol.tools import MAX_DESCRIPTION_CHARS, MAX_SCHEMA_CHARS
from serve_app.protocol.wire import MAX_TOOLS

INFO = ModelInfo(id="m", max_model_len=100, vocab_size=50, created=1, grammars=True, tools=True, reasoning=True)
BARE = replace(INFO, grammars=False, tools=False, reasoning=False)
USER = {"role": "user", "content": "hi"}
SECRET = "do-not-echo-me"


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def asked(info: ModelInfo = INFO, **fields: Any) -> GenerateRequest:
    wire = validate(ChatRequest, {"model": "m", "messages": [USER], **fields})
    return chat_job(wire, info, max_choices=4, max_messages=4).requests[0]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [SECRET]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools[1].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(5)]}, "tools[0].function.name"),
    ({"tools": [tool(description="x" * (MAX_DESCRIPTION_CHARS + 1))]}, "tools[0].function.description"),
    ({"tools": [tool(parameters=[SECRET])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"enum": ["x" * MAX_SCHEMA_CHARS]})]}, "tools[0].function.parameters"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(unheard_of=1)]}, "tools[0].function.unheard_of"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools"),
    ({"tools": [tool()], "tool_choice": SECRET}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [tool()], "logprobs": True}, "logprobs"),
    ({"tools": [tool()], "response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "endless"}, "reasoning_effort"),
    ({"separate_reasoning": 1}, "separate_reasoning"),
]
NOT_OFFERED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool()]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("f")}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"separate_reasoning": True}, "separate_reasoning"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_a_wrong_field_is_named_and_its_value_never_quoted(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.param == param and SECRET not in caught.value.message


@pytest.mark.parametrize(("fields", "param"), NOT_OFFERED)
def test_without_a_parser_they_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        asked(BARE, **fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"reasoning_effort": "none"}]
)
@pytest.mark.parametrize("info", [INFO, BARE])
def test_what_changes_nothing_is_accepted_of_any_engine(info: ModelInfo, fields: dict[str, Any]) -> None:
    assert asked(info, **fields).tools is None


def test_an_engine_without_a_tool_parser_says_so() -> None:
    with pytest.raises(Unsupported, match=r"^tools: this engine has no tool parser"):
        asked(BARE, tools=[tool()])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        ({"tools": [tool("g"), tool(strict=True)]}, "tools[1].function.strict"),
    ],
)
def test_what_needs_a_grammar_is_refused_without_one(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        asked(replace(INFO, grammars=False), **{"tools": [tool()], **fields})
    assert caught.value.param == param


def test_tools_reach_the_engine_as_they_are() -> None:
    schema = {"type": "object", "properties": {"x": {"type": ["string", "null"]}}}
    request = asked(tools=[tool("a-b_1", description="d", parameters=schema, strict=True), tool("g", strict=False)])
    assert request.tools == (
        tool("a-b_1", description="d", parameters=schema, strict=True),
        tool("g", strict=False),
    )
    assert (request.tool_choice, request.parallel_tool_calls) == ("auto", True)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("auto", ("auto", None)),
        (None, ("auto", None)),
        ("required", ("required", None)),
        (named("f"), ("required", "f")),
    ],
)
def test_the_choice_reaches_the_engine(choice: Any, wanted: Any) -> None:
    fields = {} if choice is None else {"tool_choice": choice}
    request = asked(tools=[tool()], **fields)
    assert (request.tool_choice, request.named_tool) == wanted


def test_several_calls_may_be_forbidden() -> None:
    assert asked(tools=[tool()], parallel_tool_calls=False).parallel_tool_calls is False


def test_the_choice_of_none_hides_the_tools() -> None:
    request = asked(tools=[tool()], tool_choice="none", logprobs=True)
    assert request.tools is None and request.sampling.logprobs == 0


def test_reasoning_fields_reach_the_engine() -> None:
    request = asked(reasoning_effort="low", separate_reasoning=False)
    assert (request.reasoning_effort, request.separate_reasoning) == ("low", False)
    assert (asked().reasoning_effort, asked().separate_reasoning) == (None, True)


def test_null_is_a_value_in_a_schema() -> None:
    body = b'{"tools": [{"function": {"description": null, "parameters": {"const": null}}}], "n": null}'
    assert parse_object(body) == {"tools": [{"function": {"parameters": {"const": None}}}]}


def test_tools_are_counted_with_their_chat() -> None:
    wire = validate(TokenizeRequest, {"messages": [USER], "tools": [tool()]})
    assert tokenize_request(wire, INFO, max_messages=9).tools == (tool(),)
    for info, fields in ((BARE, {"messages": [USER]}), (INFO, {"prompt": "hi"})):
        with pytest.raises(InvalidRequest) as caught:
            tokenize_request(validate(TokenizeRequest, {"tools": [tool()], **fields}), info, max_messages=9)
        assert caught.value.param == "tools"
