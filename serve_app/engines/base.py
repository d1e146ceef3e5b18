"""The seam between serving and generation.

An engine is started once, then takes any number of concurrent requests. It renders the chat template itself,
because engines that bring their own OpenAI layer (SGLang) must be able to use it.

What this module does not do: HTTP, Ray, OpenAI wire shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from serve_app.errors import EngineFailed

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Defaults are OpenAI's; every value is already validated.

    Attributes:
        max_tokens: tokens to generate at most, None for "until the context is full". max_tokens_name: what the request
            calls it, for refusals.
        temperature: 0 is greedy.
        top_p, top_k, min_p: applied to the target's distribution in the order temperature → top_k → top_p →
            min_p; `top_k` 0 is off.
        seed: the same seed and prompt give the same text, whatever else runs; None draws one.
        repetition_penalty: 1 is off; applies to prompt and generated tokens. presence/frequency_penalty: 0 is
            off; apply to generated tokens.
        logit_bias: token id → value added to the logit.
        stop: strings that end the text and are not part of it. stop_token_ids: likewise, as tokens.
        ignore_eos: keep generating past the model's end tokens. min_tokens: end tokens and stops before this
            many tokens are not sampled.
        logprobs: None for none; otherwise how many alternatives to return beside each token's own
            log-probability (0 to 20). They are the target's own, before temperature, penalties and bias.
        json_schema: JSON text of a JSON Schema that the answer must be a document of, null for none. Only engines
            whose `ModelInfo.grammars` says so get it.
        n: independent choices for the prompt; choice j of a seeded request is sampled with seed + j.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    json_schema: str | None = None
    n: int = 1
    max_tokens_name: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, as text, as token ids, or as chat messages (exactly one of them is given).

    `messages` and `tools` are plain OpenAI dictionaries; the engine renders its chat template.

    `tools`: what the answer may call, only for engines whose `ModelInfo.tools` says so; None where none may be called.
    `tool_choice`: whether it may call or must; `named_tool`: of these tools it must call this one.
    `parallel_tool_calls`: whether the answer may have several calls. `reasoning_effort`: OpenAI's word for how much to
    reason, "none" for not at all, None for the model's own way. `separate_reasoning`: whether reasoning is told apart
    from the answer, where `ModelInfo.reasoning` says that the engine can.

    `emitted`: tokens that another engine already emitted for this prompt, where `n` is 1. The engine goes on behind
    them as if it had emitted them itself: its chunks hold only what is new, limits and usage count all, and stop
    strings, penalties, seed and characters continue. Only engines whose `ModelInfo.continues` says so get it.
    """

    request_id: str
    sampling: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: Literal["auto", "required"] = "auto"
    named_tool: str | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    separate_reasoning: bool = True
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log) of one emitted token and of its best alternatives.

    `bytes` are what the token adds to the text: none for special tokens, which `token` spells.
    """

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """`completion_tokens` counts every emitted token, the one that ended the text included. `reasoning_tokens`: those
    of them that are reasoning, the marks around it included; None where nobody can tell exactly."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trail:
    """How one choice came about, for traces. Times are Unix time in nanoseconds, None for what was never reached.

    Attributes:
        queued_ns: it began to wait. admitted_ns: it got its slot. first_token_ns, finished_ns: of its answer.
        steps: verify steps. accepted: drafts accepted in them. nodes: tree nodes verified, roots excluded.
        eager_forwards: forwards over batches it was part of that no graph served.
    """

    queued_ns: int
    finished_ns: int
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    steps: int = 0
    accepted: int = 0
    nodes: int = 0
    eager_forwards: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step committed for one choice.

    Attributes:
        index: which of the request's `n` choices.
        token_ids: every token committed by the step (several under speculation), trimmed at a stop.
        text: their text, only whole characters, never a prefix of a stop string that may still complete; so it
            can lag behind `token_ids` and be empty.
        logprobs: one entry per token id, when asked for.
        finish_reason: set on the choice's last chunk. stop_reason: the stop string or token id that ended it.
        usage: on the choice's last chunk. trail: likewise, where the engine keeps such books.
        delta: engine-parsed OpenAI delta fields when the engine has parsers: `reasoning_content`, text, and
            `tool_calls`, with at most one entry for each call; its first has `id`, `type` and the function's name.
            `text` is then what is neither.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    delta: Mapping[str, Any] | None = None
    trail: Trail | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for routing and admission; all numbers are of this moment. `last_token_age_s`: since a token came, or
    since a part of a prompt was computed where the engine tells; None for an engine that is dead or has done neither.
    """

    running: int
    queued: int
    slots: int
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    last_token_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What `/v1/models` and validation need to know. `max_model_len` is in tokens, prompt and answer together.

    `continues`: which requests go on from `GenerateRequest.emitted` with the text of an undisturbed run: none, greedy
    ones (others then go on with fresh randomness), or seeded ones too. `grammars`: whether it takes
    `SamplingParams.json_schema`. `tools`: whether it takes `GenerateRequest.tools`. `reasoning`: whether it tells
    reasoning apart.
    """

    id: str
    max_model_len: int
    vocab_size: int
    created: int
    owned_by: str = "ddtree-serve"
    continues: Literal["none", "greedy", "seeded"] = "none"
    grammars: bool = False
    tools: bool = False
    reasoning: bool = False


@runtime_checkable
class Engine(Protocol):
    """Errors of `serve_app.errors` are raised; anything else is a fault of the engine."""

    async def start(self) -> None:
        """Load, warm up, and return when tokens can be generated. Raises ModelFetchError or ConfigError."""

    def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Generate. The first `__anext__` raises InvalidRequest, ContextLengthExceeded, Unsupported or Overloaded
        when the request is refused, and EngineGone where the engine has died or was stopped. An engine that dies
        later raises ReplicaLost. Closing the iterator, or cancelling the task that reads it, aborts."""

    async def abort(self, request_id: str) -> bool:
        """Stop a request and free its slots; True if it was there. Its iterator ends with finish_reason "abort"."""

    async def health(self) -> None:
        """Generate a token through the real step loop, however long that takes. Raises EngineFailed when that does not
        succeed."""

    def stats(self) -> EngineStats: ...

    def info(self) -> ModelInfo:
        """Also of an engine that has died, until it is stopped; so are token ids and texts."""

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Token ids of the prompt exactly as `submit` would feed them."""

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    async def stop(self) -> None:
        """Abort everything, free the model, end the engine's threads. Idempotent."""


async def first_token(engine: Engine, timeout_s: float) -> None:
    """For the end of `start`. Raises EngineFailed where no token comes within `timeout_s`."""
    try:
        await asyncio.wait_for(engine.health(), timeout_s)
    except TimeoutError:
        raise EngineFailed(f"the engine started, but generated no token within {timeout_s:g} s") from None
