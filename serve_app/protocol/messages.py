"""Chat messages as OpenAI clients send them, and the plain dictionaries that engines render.

What this module does not do: render templates; media parts are refused, because the served models read text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.errors import InvalidRequest


class Wire(BaseModel):
    """Strict types ("10" is no integer, true is no number), unknown keys refused, no infinities."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, value: Any) -> Any:
        """Of many unknown keys the first is refused: a finding for each of a hundred thousand would take seconds."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(key for key in value if key not in known)
        return {key: item for key, item in value.items() if key in known or key is unknown}


class TextPart(Wire):
    type: Literal["text"]
    text: str


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


# Of a list without a bound only the first wrong item is looked for: a finding for each of a million would take seconds.
TextContent = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
AssistantContent = str | Annotated[list[AssistantPart], Field(min_length=1, fail_fast=True)]


class FunctionCall(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(Wire):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(Wire):
    role: Literal["system"]
    content: TextContent
    name: str | None = None


class DeveloperMessage(Wire):
    role: Literal["developer"]
    content: TextContent
    name: str | None = None


class UserMessage(Wire):
    role: Literal["user"]
    content: TextContent
    name: str | None = None


class AssistantMessage(Wire):
    """`content` may be absent or null, as in a turn that only called tools."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def lower_roles(messages: Any) -> Any:
    """Roles in lower case, whatever the shape of the rest (it is validated afterwards)."""
    if not isinstance(messages, list):
        return messages
    return [
        {**m, "role": m["role"].lower()} if isinstance(m, dict) and isinstance(m.get("role"), str) else m
        for m in messages
    ]


def plain_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Dictionaries for a chat template: `content` is always one string, optional keys only when given.

    Raises:
        InvalidRequest: a tool message answers no call of a preceding assistant message.
    """
    called: set[str] = set()
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": _text(message)}
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                entry["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                entry["tool_calls"] = [call.model_dump() for call in message.tool_calls]
                called.update(call.id for call in message.tool_calls)
        elif isinstance(message, ToolMessage):
            if message.tool_call_id not in called:
                raise InvalidRequest(
                    "A tool message must answer a call in the tool_calls of a preceding assistant message.",
                    param=f"messages[{index}].tool_call_id",
                )
            entry["tool_call_id"] = message.tool_call_id
        name = getattr(message, "name", None)
        if name is not None:
            entry["name"] = name
        plain.append(entry)
    return tuple(plain)


def _text(message: Message) -> str:
    content = message.content
    if content is None:
        return (message.refusal or "") if isinstance(message, AssistantMessage) else ""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
