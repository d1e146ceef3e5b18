"""SGLang as the replica's engine: the seam's side of it, on the replica's event loop.

Prompts are rendered and token ids made into text here, with the embedded engine's own code; SGLang is given token ids
and answers with token ids. Choices are requests of their own, which share their prompt in SGLang's prefix cache.

What this module does not do: start or watch processes (`host`), or parse tool calls and reasoning (`tooling`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry

from serve_app.config import Config
from serve_app.engines.base import Chunk, EngineStats, GenerateRequest, ModelInfo, first_token
from serve_app.engines.local.detokenizer import make_detokenizer
from serve_app.engines.local.limits import bounded_tokens, check_choices, check_sampling, check_tokens
from serve_app.engines.local.stopping import TextStream
from serve_app.engines.sglang.arguments import environment
from serve_app.engines.sglang.choice import Choice, refusal, refused_field
from serve_app.engines.sglang.exposition import OwnSeries
from serve_app.engines.sglang.host import Host
from serve_app.engines.sglang.loading import Parts, parts_of, prepare
from serve_app.engines.sglang.parsed import ParsedStream
from serve_app.engines.sglang.requests import generation, refuse, sampling_params
from serve_app.engines.sglang.submission import Courier, Submission
from serve_app.engines.sglang.tooling import Plan
from serve_app.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineGone,
    InvalidRequest,
    NotReady,
    Overloaded,
    ServeError,
)
from serve_app.metrics import OUTCOMES, LoadMetrics

logger = logging.getLogger(__name__)
# The second token needs a decode step, or one of draft and verification.
_PROBE_TOKENS = 2
# Characters of a prompt that are tokenized on the event loop, in about half a millisecond. A hop to a thread and back
# costs as much as a short question, and waits for the interpreter's lock behind whatever else this process does.
_SHORT = 2048


class SglangEngine:
    """Implements `serve_app.engines.base.Engine`.

    Args:
        config: the whole tree; `model`, `speculation`, `engine` and `sglang` are read.
        registry: where `LoadMetrics` are declared and SGLang's own series appear, None for no metrics.
        start_timeout_s: how long `start` waits for the first tokens.
    """

    def __init__(
        self, config: Config, registry: CollectorRegistry | None = None, *, start_timeout_s: float | None = None
    ) -> None:
        self._config = config
        self._start_timeout = start_timeout_s or config.replica.first_token_s
        self._registry = registry
        self._metrics: LoadMetrics | None = None
        self._host: Host | None = None
        self._parts: Parts | None = None
        self._starting = asyncio.Lock()
        self._submissions: dict[str, Submission] = {}
        self._courier = Courier()
        self._created = int(time.time())
        self._alive_at: float | None = None
        self._kv_used = self._waiting = self._computed = 0

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._starting:
            if self._host is not None:
                return
            arguments = await asyncio.to_thread(prepare, self._config)
            host = self._host = Host(arguments, environment(self._config), self._on_death, self._on_watch)
            try:
                await host.start()
                host.manager.after = self._courier.go
                self._parts = parts_of(host.manager, host.info, host.templates)
                self._declare(self._parts)
                await first_token(self, self._start_timeout)
            except BaseException:
                await self._end()
                raise

    def _declare(self, parts: Parts) -> None:
        """Series, after everything that can be refused: a registry takes each once."""
        if self._registry is not None and self._metrics is None:
            self._metrics = LoadMetrics(self._registry, self._config.model.id)
            self._registry.register(OwnSeries())
        if self._metrics is not None:
            self._metrics.capacity(self._config.engine.max_running, parts.kv_tokens)

    async def stop(self) -> None:
        host = self._host
        if host is not None and self._starting.locked():
            await host.stop()  # what still starts fails, and lets go of the lock
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        host, self._host = self._host, None
        for submission in list(self._submissions.values()):
            submission.end_all()
        if host is not None:
            await host.stop()
        for submission in list(self._submissions.values()):
            submission.lose()  # what the thread could not end any more
        self._parts = None

    def _on_death(self, reason: str) -> None:
        """On SGLang's thread. The answers may go on elsewhere: this replica is as good as lost."""
        logger.error("%d requests lost their engine: %s", len(self._submissions), reason)
        for submission in list(self._submissions.values()):
            submission.lose()

    def _on_watch(self) -> None:
        """On SGLang's thread, several times a second: read the scheduler's own books from shared memory."""
        host = self._host
        if host is None or host.manager is None:
            return
        loads = host.manager.load_snapshot_reader.read_all()
        self._kv_used = sum(load.num_used_tokens for load in loads)
        self._waiting = sum(load.num_waiting_reqs for load in loads)
        computed = sum(load.total_prefill_uncached_tokens for load in loads)
        if computed != self._computed:
            # No token comes from anybody while the chunks of one long prompt are computed, each of them a step.
            self._computed, self._alive_at = computed, time.monotonic()
        if self._metrics is not None:
            stats = self.stats()
            self._metrics.load(stats.running, stats.queued, stats.kv_tokens_used)

    # -- generation ------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        host, parts = self._running()
        check_sampling(request.sampling, parts.vocab)
        refuse(request, parts.offer)
        plan, prompt = await _planned(parts, request)
        max_tokens = bounded_tokens(request, len(prompt), parts.context)
        if len(prompt) + len(request.emitted) > parts.longest_prompt:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; at most {parts.longest_prompt} can be computed",
                param="messages" if request.messages is not None else "prompt",
            )
        submission = Submission(asyncio.get_running_loop(), request.sampling.n)
        self._admit(request.request_id, submission)
        outcome = "abort"  # of the choices that the reader leaves
        try:
            for index in range(request.sampling.n):
                choice, asked = _choice(parts, request, plan, index, prompt, max_tokens)
                submission.add(host, choice)
                host.run(self._begin, host, submission, choice, asked)
            async for chunk in submission.chunks():
                self._count(chunk)
                yield chunk
        except ServeError as error:
            outcome = "error" if isinstance(error, (EngineFailed, NotReady)) else "refused"
            raise
        finally:
            for _ in range(submission.open):
                self._ended(outcome)
            if self._submissions.get(request.request_id) is submission:
                del self._submissions[request.request_id]
            submission.leave()

    def _admit(self, request_id: str, submission: Submission) -> None:
        if request_id in self._submissions:
            raise InvalidRequest("a request with this id is already running", param="request_id")
        engine = self._config.engine
        check_choices(submission.open, engine)
        if self._in_flight() + submission.open > engine.max_queued + engine.max_running:
            raise Overloaded("the engine's queue is full", retry_after=1)
        self._submissions[request_id] = submission

    def _begin(self, host: Host, submission: Submission, choice: Choice, asked: dict[str, Any]) -> None:
        """On SGLang's loop: ask the scheduler for one choice. An abort ends it in the scheduler's own time, so that
        SGLang's state of it goes in the ordinary way."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        if choice.over:  # left before it began: SGLang ignores an abort of what it does not know yet
            return
        take = functools.partial(self._take, host, submission, choice)
        try:
            host.manager.begin(GenerateReqInput(**asked), take)
        except ValueError as error:
            choice.over = True
            submission.send(refusal(HTTPStatus.BAD_REQUEST, str(error), choice.param))
        except Exception as error:
            choice.over = True
            submission.send(_failure(error))

    def _take(self, host: Host, submission: Submission, choice: Choice, output: dict[str, Any]) -> None:
        """On SGLang's loop: what a step made of a choice. Others share the step: nothing is raised."""
        if choice.over:
            return
        try:
            if (chunk := _fed(choice, output)) is not None:
                self._courier.put(submission, chunk)
            if choice.over and output["meta_info"]["finish_reason"] is None:
                host.manager.abort_request(choice.rid)
        except Exception as error:
            choice.over = True
            self._courier.put(submission, error if isinstance(error, ServeError) else _failure(error))
            host.manager.abort_request(choice.rid)

    def _count(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            self._alive_at = time.monotonic()
        if chunk.finish_reason is not None:
            self._ended(chunk.finish_reason)

    def _ended(self, outcome: str) -> None:
        if self._metrics is not None and outcome in OUTCOMES:
            self._metrics.ended(outcome)

    async def abort(self, request_id: str) -> bool:
        submission = self._submissions.get(request_id)
        if submission is None:
            return False
        submission.end_all()
        return True

    # -- looking in ------------------------------------------------------------------------------------------------

    async def health(self) -> None:
        host, parts = self._loaded()
        if host.dead is not None:
            raise EngineFailed(host.dead)
        rid = f"health-{uuid.uuid4().hex}"
        sampling = {"max_new_tokens": _PROBE_TOKENS, "temperature": 0.0, "ignore_eos": True}
        asked = generation(rid, [min(parts.end_tokens, default=0)], sampling, None)
        try:
            probe = asyncio.wrap_future(host.call(_probe(host, {**asked, "log_metrics": False})))
            tokens = await probe
        except EngineGone as error:
            raise EngineFailed(host.dead or error.message) from None
        finally:
            host.post(host.manager.abort_request, rid)
        if tokens < _PROBE_TOKENS:
            raise EngineFailed(host.dead or "the scheduler gave the health check up")
        self._alive_at = time.monotonic()

    def stats(self) -> EngineStats:
        parts, slots = self._parts, self._config.engine.max_running
        asked = self._in_flight()
        queued = min(asked, max(asked - slots, self._waiting))
        # A dead engine's last token proves nothing: without it the watchdog asks at once.
        last = None if self._host is not None and self._host.dead is not None else self._alive_at
        return EngineStats(
            running=asked - queued,
            queued=queued,
            slots=slots,
            kv_tokens_used=self._kv_used,
            kv_tokens_total=parts.kv_tokens if parts else 0,
            last_token_age_s=None if last is None else time.monotonic() - last,
        )

    def _in_flight(self) -> int:
        return sum(submission.open for submission in list(self._submissions.values()))

    def info(self) -> ModelInfo:
        _, parts = self._loaded()
        return ModelInfo(
            self._config.model.id,
            parts.context,
            parts.vocab,
            self._created,
            continues="seeded" if parts.offer.seeds else "greedy",
            grammars=parts.offer.grammars,
            tools=parts.tooling.tools,
            reasoning=parts.tooling.reasoning,
        )

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        _, parts = self._loaded()
        return (await asyncio.to_thread(_prompt, parts, request))[1]

    async def detokenize(self, token_ids: Seq[int]) -> str:
        _, parts = self._loaded()
        check_tokens(token_ids, parts.vocab)
        return await asyncio.to_thread(parts.vocabulary.decode, token_ids)

    def _running(self) -> tuple[Host, Parts]:
        host, parts = self._loaded()
        if host.dead is not None:
            raise EngineGone("The engine of this replica has died.", retry_after=1)
        return host, parts

    def _loaded(self) -> tuple[Host, Parts]:
        """Whether it lives or has died."""
        if self._host is None or self._parts is None:
            raise EngineGone("The engine of this replica is not running.", retry_after=1)
        return self._host, self._parts


def _prompt(parts: Parts, request: GenerateRequest, context: int | None = None) -> tuple[Plan, list[int]]:
    """How the request is put, and its prompt. Raises what `Tooling.plan` and `PromptRenderer.encode` raise."""
    plan = parts.tooling.plan(request)
    return plan, parts.prompts.encode(plan.prompt, context)


def _choice(
    parts: Parts, request: GenerateRequest, plan: Plan, index: int, prompt: list[int], max_tokens: int
) -> tuple[Choice, dict[str, Any]]:
    """State of one choice, and what SGLang is asked for it."""
    params, emitted = request.sampling, request.emitted
    vocabulary = parts.tooling.spelled if plan.spelled else parts.vocabulary
    plain = TextStream(params, make_detokenizer(vocabulary), max_tokens, parts.end_tokens)
    text = plain if plan.read is None else ParsedStream(plain, plan.read())
    text.resume(emitted)
    rid = f"{request.request_id}-{index}-{uuid.uuid4().hex}"
    seed = None
    if parts.offer.seeds:
        # Without one of its own SGLang would give every request the same.
        seed = secrets.randbits(62) if params.seed is None else (params.seed + index) % 2**63
    sampling = {**sampling_params(params, max_tokens - len(emitted), seed), **plan.grammar}
    asked = generation(rid, [*prompt, *emitted], sampling, params.logprobs, plan.reasons)
    field = refused_field(params, bool(plan.grammar))
    return Choice(index, rid, len(prompt), text, parts.vocabulary, params.logprobs, field), asked


def _fed(choice: Choice, output: Mapping[str, Any]) -> Chunk | None:
    """`Choice.feed`; only SGLang's own ValueErrors are refusals."""
    try:
        return choice.feed(output)
    except ValueError as error:
        raise EngineFailed("SGLang's output could not be read") from error


async def _planned(parts: Parts, request: GenerateRequest) -> tuple[Plan, list[int]]:
    """`_prompt`, for the engine's context."""
    given: Seq[Any] = request.prompt or request.prompt_token_ids or ()
    pieces = (*(request.messages or ()), *(request.tools or ()))
    characters = len(given) + sum(len(str(piece)) for piece in pieces)
    if characters > _SHORT:
        return await asyncio.to_thread(_prompt, parts, request, parts.context)
    return _prompt(parts, request, parts.context)


def _failure(error: Exception) -> EngineFailed:
    """What a reader is told of a fault of ours or SGLang's."""
    failure = EngineFailed("The engine failed while it worked on this request.")
    failure.__cause__ = error
    return failure


async def _probe(host: Host, asked: dict[str, Any]) -> int:
    """Tokens that SGLang generates for a request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    tokens, ended = 0, asyncio.get_running_loop().create_future()

    def take(output: dict[str, Any]) -> None:
        nonlocal tokens
        finish = output["meta_info"]["finish_reason"]
        if finish is None or finish["type"] != "abort":
            tokens += len(output["output_ids"])
        if finish is not None and not ended.done():
            ended.set_result(None)

    host.manager.begin(GenerateReqInput(**asked), take)
    await ended
    return tokens
