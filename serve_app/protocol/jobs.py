"""A validated request → a `Job`: what travels from the ingress to a replica. And what travels back: `Item`s.

Both are plain data: pydantic objects and API errors as exceptions do not survive the trip between processes well.

What this module does not do: tokenize; whether a prompt fits the context is the engine's to say.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.engines.base import GenerateRequest, ModelInfo, SamplingParams
from serve_app.errors import InvalidRequest, ServeError, Unsupported
from serve_app.protocol.messages import Message, plain_messages
from serve_app.protocol.resume import Progress
from serve_app.protocol.tools import tool_fields
from serve_app.protocol.wire import (
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
    Sampling,
    TextFormat,
    TokenizeRequest,
)

COMPLETION_MAX_TOKENS = 16
# Arguments of the template renderers themselves; a client may set variables, not replace the template.
_RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "template", "self", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("processor_kwargs", "load_audio_from_video", "sanitize_control_tokens", "kwargs"),
    )
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a job comes from: its request's id, the W3C headers of the trace it is part of, and when it was sent on."""

    request_id: str = ""
    trace: dict[str, str] = field(default_factory=dict)
    sent_ns: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request: its prompts run concurrently; choice `j` of prompt `i` has index `i * n + j`.

    `session`: what the client calls the chat, for routing. `sent`: per choice, what a replica that was lost had sent of
    it; empty for a job from its beginning. `shunned`: names of replicas that lost it or could not take it; it shall go
    to others while there are any.
    """

    id: str
    created: int
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    requests: tuple[GenerateRequest, ...]
    origin: Origin = Origin()
    sent: tuple[Progress | None, ...] = ()
    session: str = ""
    shunned: frozenset[str] = frozenset()

    @property
    def choices(self) -> int:
        return len(self.requests) * self.requests[0].sampling.n


class Item(NamedTuple):
    """What a replica yields for a job. A tuple, since one is made for every step of every stream, twice.

    Attributes:
        data: finished SSE frames; for `stream: false` nothing in a first item, which comes with the first tokens where
            they are not the last, and the whole JSON body in the last.
        tokens: tokens emitted since the last item. content: whether `data` has text of the answer.
        error: why the job ended; in the first item nothing was sent yet, later `data` holds the error's frames.
        progress: of a stream, the tokens behind `data`, from which another replica could go on.
        replica: with an error, whose it is, as routers name it; empty where nobody routes.
        last: its maker knows that none follows; the reader need not wait to learn it.
    """

    data: bytes = b""
    tokens: int = 0
    content: bool = False
    error: ServeError | None = None
    progress: tuple[Progress, ...] = ()
    replica: str = ""
    last: bool = False


def chat_job(wire: ChatRequest, info: ModelInfo, *, max_choices: int, max_messages: int) -> Job:
    """Raises InvalidRequest or Unsupported, naming the field."""
    _check_messages(wire.messages, max_messages)
    if None not in (wire.max_tokens, wire.max_completion_tokens) and wire.max_tokens != wire.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them.", param="max_tokens")
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    limit, limit_name = wire.max_tokens, "max_tokens"
    if limit is None and wire.max_completion_tokens is not None:
        limit, limit_name = wire.max_completion_tokens, "max_completion_tokens"
    logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    tools = tool_fields(wire.tools, wire.tool_choice, wire.parallel_tool_calls, info)
    schema = _json_schema(wire.response_format, info)
    if tools and logprobs is not None:
        # A call's tokens are no text of the answer.
        raise Unsupported("logprobs cannot be combined with tools.", param="logprobs")
    if tools and schema is not None:
        raise Unsupported("response_format other than text cannot be combined with tools.", param="response_format")
    request = GenerateRequest(
        request_id=_new_id("chatcmpl"),
        sampling=_sampling(wire, info, limit, logprobs, max_choices, schema, limit_name),
        messages=plain_messages(wire.messages),
        chat_template_kwargs=_template_kwargs(wire.chat_template_kwargs),
        **tools,
        **_reasoning_fields(wire, info),
    )
    return _job(wire, info, request.request_id, (request,), chat=True)


def _reasoning_fields(wire: ChatRequest, info: ModelInfo) -> dict[str, Any]:
    """Raises Unsupported for what only an engine that tells reasoning apart can do."""
    if info.reasoning:
        return {"reasoning_effort": wire.reasoning_effort, "separate_reasoning": wire.separate_reasoning is not False}
    asked = {
        "reasoning_effort": wire.reasoning_effort not in (None, "none"),
        "separate_reasoning": wire.separate_reasoning,
    }
    for name in (name for name, given in asked.items() if given):
        raise Unsupported(f"{name} is not offered as given. Not offered: the model does not reason.", param=name)
    return {}


def _json_schema(wanted: ResponseFormat | None, info: ModelInfo) -> str | None:
    """What the answer must be a document of. Raises Unsupported where no grammar is enforced, InvalidRequest."""
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if not info.grammars:
        raise Unsupported("response_format other than text is not offered by this engine.", param="response_format")
    try:
        return json.dumps(wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else {"type": "object"})
    except RecursionError:
        raise InvalidRequest("response_format is nested too deeply.", param="response_format") from None


def completion_job(wire: CompletionRequest, info: ModelInfo, *, max_choices: int, max_prompts: int) -> Job:
    """Raises InvalidRequest or Unsupported, naming the field."""
    n = wire.n or 1
    if wire.best_of is not None and wire.best_of != n:
        raise Unsupported("best_of other than n is not offered: choices are not ranked.", param="best_of")
    prompts = _prompts(wire, info)
    if len(prompts) > max_prompts:
        raise InvalidRequest(f"prompt may have at most {max_prompts} entries.", param="prompt")
    if len(prompts) * n > max(max_prompts, max_choices):
        most = max(max_prompts, max_choices)
        raise InvalidRequest(f"Prompts times n may be at most {most} choices.", param="n")
    limit = COMPLETION_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens
    sampling = _sampling(wire, info, limit, wire.logprobs, max_choices)
    id = _new_id("cmpl")
    requests = tuple(
        GenerateRequest(
            request_id=f"{id}-{index}",
            sampling=sampling,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
        )
        for index, prompt in enumerate(prompts)
    )
    return _job(wire, info, id, requests, chat=False)


def tokenize_request(wire: TokenizeRequest, info: ModelInfo, *, max_messages: int) -> GenerateRequest:
    """Raises InvalidRequest unless exactly one of prompt and messages is there, with no more messages than that;
    Unsupported for tools that no engine takes."""
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("Give exactly one of prompt and messages.", param="prompt")
    if wire.tools and wire.messages is None:
        raise InvalidRequest("tools need messages.", param="tools")
    _check_messages(wire.messages or (), max_messages)
    return GenerateRequest(
        request_id=_new_id("tok"),
        sampling=SamplingParams(),
        prompt=wire.prompt,
        messages=None if wire.messages is None else plain_messages(wire.messages),
        chat_template_kwargs=_template_kwargs(wire.chat_template_kwargs),
        **tool_fields(wire.tools, None, None, info),
    )


def _check_messages(messages: Sequence[Message], most: int) -> None:
    if len(messages) > most:
        raise InvalidRequest(f"messages may have at most {most} entries.", param="messages")


def check_token_ids(ids: Sequence[int], info: ModelInfo, param: str) -> None:
    """Raises InvalidRequest naming the first id outside the vocabulary by its place."""
    for index, token in enumerate(ids):
        if token >= info.vocab_size:
            raise InvalidRequest(
                f"Token ids must be below the vocabulary size, {info.vocab_size}.", param=f"{param}[{index}]"
            )


def _job(wire: Sampling, info: ModelInfo, id: str, requests: tuple[GenerateRequest, ...], *, chat: bool) -> Job:
    stream = bool(wire.stream)
    if wire.stream_options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    usage = wire.stream_options is not None and bool(wire.stream_options.include_usage)
    return Job(
        id=id, created=int(time.time()), model=info.id, chat=chat, stream=stream, include_usage=usage, requests=requests
    )


def _sampling(
    wire: Sampling,
    info: ModelInfo,
    max_tokens: int | None,
    logprobs: int | None,
    max_choices: int,
    json_schema: str | None = None,
    max_tokens_name: str = "max_tokens",
) -> SamplingParams:
    n = wire.n or 1
    if n > max_choices:
        raise InvalidRequest(f"n may be at most {max_choices}.", param="n")
    min_tokens = wire.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens may not exceed {max_tokens_name}.", param="min_tokens")
    if min_tokens > info.max_model_len:
        raise InvalidRequest("min_tokens exceeds the model's context.", param="min_tokens")
    stop_ids = tuple(wire.stop_token_ids or ())
    check_token_ids(stop_ids, info, "stop_token_ids")
    bias = {int(token): float(value) for token, value in (wire.logit_bias or {}).items()}
    if any(token >= info.vocab_size for token in bias):
        raise InvalidRequest(f"Token ids must be below the vocabulary size, {info.vocab_size}.", param="logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(wire.temperature, 1.0),
        # A nucleus without mass is the most likely token alone.
        top_p=max(_or(wire.top_p, 1.0), 1e-6),
        top_k=max(wire.top_k or 0, 0),
        min_p=_or(wire.min_p, 0.0),
        seed=wire.seed,
        repetition_penalty=_or(wire.repetition_penalty, 1.0),
        presence_penalty=_or(wire.presence_penalty, 0.0),
        frequency_penalty=_or(wire.frequency_penalty, 0.0),
        logit_bias=bias,
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        stop_token_ids=stop_ids,
        ignore_eos=bool(wire.ignore_eos),
        min_tokens=min_tokens,
        logprobs=logprobs,
        json_schema=json_schema,
        n=n,
        max_tokens_name=max_tokens_name,
    )


def _prompts(wire: CompletionRequest, info: ModelInfo) -> list[str | tuple[int, ...]]:
    prompt: Any = wire.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        check_token_ids(prompt, info, "prompt")
        return [tuple(prompt)]
    for index, entry in enumerate(prompt):
        if not isinstance(entry, str):
            check_token_ids(entry, info, f"prompt[{index}]")
    return [entry if isinstance(entry, str) else tuple(entry) for entry in prompt]


def _template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    reserved = _RESERVED_KWARGS.intersection(given or ())
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    return dict(given or {})


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
