"""Shapes of answers, for the OpenAPI document only; the token path renders bytes directly (see `frames`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorBody


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    prompt: str


class Status(BaseModel):
    status: Literal["ok"]


class EngineState(BaseModel):
    replica: str
    verify_steps: int
    avg_spec_accept_length: float | None


class ServerInfo(BaseModel):
    version: str
    model_path: str
    served_model_name: str
    max_model_len: int
    speculation: dict[str, Any]
    engine: dict[str, Any]
    num_replicas: int
    internal_states: list[EngineState]


class Version(BaseModel):
    version: str


class Target(BaseModel):
    targets: list[str]
    labels: dict[str, str]


class Targets(RootModel[list[Target]]):
    pass
