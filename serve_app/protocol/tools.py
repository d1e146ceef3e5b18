"""Tools as OpenAI clients send them, and what a chat may ask of them.

What this module does not do: look into a JSON schema beyond its size and its type (the engine does), or render or parse
calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from serve_app.engines.base import ModelInfo
from serve_app.errors import InvalidRequest, Unsupported
from serve_app.protocol.messages import Wire

MAX_DESCRIPTION_CHARS = 16 * 1024
MAX_SCHEMA_CHARS = 64 * 1024

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Function(Wire):
    name: ToolName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON Schema of an object; none for no arguments.")
    strict: bool | None = Field(None, description="true: arguments follow the schema; needs an engine with grammars.")

    @field_validator("parameters")
    @classmethod
    def _schema_of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is None:
            return None
        if schema.get("type", "object") != "object":
            raise ValueError('must be the JSON Schema of an object, "type": "object"')
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            raise ValueError(f"must have at most {MAX_SCHEMA_CHARS} characters as JSON")
        return schema


class Tool(Wire):
    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    name: ToolName


class NamedToolChoice(Wire):
    type: Literal["function"]
    function: NamedFunction


def check_names(tools: list[Tool]) -> list[Tool]:
    """Raises ValueError where two tools have one name."""
    if len({tool.function.name for tool in tools}) < len(tools):
        raise ValueError("must not have the same function name twice")
    return tools


def tool_fields(
    tools: Sequence[Tool] | None,
    choice: str | NamedToolChoice | None,
    parallel: bool | None,
    info: ModelInfo,
) -> Mapping[str, Any]:
    """The fields of a GenerateRequest that say what may be called; none where nothing may.

    Raises:
        Unsupported: the engine has no tool parser, or no grammar for what must be called. InvalidRequest: a choice that
            the tools do not have.
    """
    if not info.tools:
        asked = {"tools": bool(tools), "tool_choice": choice not in (None, "none", "auto")}
        for name in (
            *(name for name, given in asked.items() if given),
            *(["parallel_tool_calls"] * (parallel is not None)),
        ):
            message = f"{name}: this engine has no tool parser (sglang.tool_call_parser names one)."
            raise Unsupported(message, param=name)
        return {}
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
        if parallel is not None:
            raise InvalidRequest("parallel_tool_calls needs tools.", param="parallel_tool_calls")
        return {}
    if isinstance(choice, NamedToolChoice) and choice.function.name not in {tool.function.name for tool in tools}:
        raise InvalidRequest("tool_choice names a function that is not among tools.", param="tool_choice.function.name")
    if choice == "none":
        return {}
    if choice not in (None, "auto") and not info.grammars:
        raise Unsupported("tool_choice other than none and auto needs an engine with grammars.", param="tool_choice")
    for index, tool in enumerate(tools):
        if tool.function.strict and not info.grammars:
            raise Unsupported("strict needs an engine with grammars.", param=f"tools[{index}].function.strict")
    return {
        "tools": tuple(tool.model_dump(exclude_none=True) for tool in tools),
        "tool_choice": "auto" if choice in (None, "auto") else "required",
        "named_tool": choice.function.name if isinstance(choice, NamedToolChoice) else None,
        "parallel_tool_calls": parallel is not False,
    }
