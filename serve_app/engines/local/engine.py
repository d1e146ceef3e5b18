"""The embedded engine: serves a Llama- or Qwen3-style model from this process, drafting with DFlash and DDTree.

The async face of the step loop. Everything that touches the models happens in the loop's one thread; this side
validates, renders prompts, and reads queues.

What this module does not do: parse tool calls or reasoning, constrain output to a grammar, share prefixes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from functools import partial

from prometheus_client import CollectorRegistry

from serve_app.config import Config
from serve_app.engines.base import Chunk, EngineStats, GenerateRequest, ModelInfo, SamplingParams, first_token
from serve_app.engines.local.detokenizer import make_detokenizer
from serve_app.engines.local.limits import bounded_tokens, check_choices, check_sampling, check_tokens
from serve_app.engines.local.loading import Parts, load
from serve_app.engines.local.loop import StepLoop
from serve_app.engines.local.penalties import LogitRules
from serve_app.engines.local.sequence import Sequence, Sink
from serve_app.engines.local.stopping import TextStream
from serve_app.engines.local.submission import Submission
from serve_app.errors import EngineFailed, EngineGone, InvalidRequest, Overloaded, ReplicaLost, ServeError
from serve_app.metrics import EngineMetrics

logger = logging.getLogger(__name__)
# Faulty steps in a row after which health reports the engine unusable.
_FAULTS = 3


class LocalEngine:
    """Implements `serve_app.engines.base.Engine`.

    Args:
        config: the whole tree; `model`, `speculation` and `engine` are read.
        registry: where `EngineMetrics` are declared at start, None for no metrics.
        start_timeout_s: how long `start` waits for the first token.
    """

    def __init__(
        self, config: Config, registry: CollectorRegistry | None = None, *, start_timeout_s: float | None = None
    ) -> None:
        self._config, self._registry = config, registry
        self._start_timeout = start_timeout_s or config.replica.first_token_s
        self._parts: Parts | None = None
        self._metrics: EngineMetrics | None = None
        self._loop: StepLoop | None = None
        self._starting = asyncio.Lock()
        self._lock = threading.Lock()
        self._submissions: dict[str, Submission] = {}
        self._posted = 0  # sequences handed to the thread and not yet in its queue
        self._dead: str | None = None
        self._created = int(time.time())
        self._last_token: float | None = None

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._starting:
            if self._loop is not None:
                return
            self._parts = await asyncio.to_thread(load, self._config, self._registry, self._metrics)
            self._metrics = self._parts.metrics
            self._dead = None
            self._loop = StepLoop(self._parts.stepper, self._on_death)
            self._loop.start()
            try:
                await first_token(self, self._start_timeout)
            except BaseException:
                await self._end()
                raise

    async def stop(self) -> None:
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        loop, parts, self._loop = self._loop, self._parts, None
        if loop is None or parts is None:
            return
        await asyncio.to_thread(loop.stop, partial(_abort_all, parts))
        parts.runner.release()
        self._parts = None

    def _on_death(self, error: BaseException) -> None:
        self._dead = f"the step loop died: {type(error).__name__}"
        if self._parts is not None:
            for sequence in self._parts.stepper.scheduler.everything():
                self._parts.stepper.scheduler.remove(sequence)
                sequence.sink(_died())
        # Also those whose sequences were posted and never reached the scheduler.
        with self._lock:
            waiting, self._posted = list(self._submissions.values()), 0
        for submission in waiting:
            submission.sequences[0].sink(_died())

    # -- generation ------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        parts, loop = self._running()
        check_sampling(request.sampling, parts.vocab)
        prompt = await asyncio.to_thread(parts.prompts.encode, request, parts.context)
        max_tokens = bounded_tokens(request, len(prompt), parts.context)
        submission = Submission(asyncio.get_running_loop())
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        for index in range(request.sampling.n):
            sink = partial(self._send, loop, submission)
            sequence = _sequence(parts, index, prompt, request.sampling, seed + index, max_tokens, sink)
            if request.emitted:
                sequence.resume(request.emitted)
            submission.sequences.append(sequence)
        self._enqueue(parts, loop, request.request_id, submission)
        try:
            async for chunk in submission.chunks():
                yield chunk
        finally:
            self._forget(request.request_id, submission)
            loop.post(partial(_abort, parts, submission))

    def _enqueue(self, parts: Parts, loop: StepLoop, request_id: str, submission: Submission) -> None:
        scheduler, wanted = parts.stepper.scheduler, len(submission.sequences)
        with self._lock:
            if request_id in self._submissions:
                raise InvalidRequest("a request with this id is already running", param="request_id")
            check_choices(wanted, self._config.engine)
            # The slots first: the step loop takes a sequence from the queue before it takes a slot, so that none that
            # moves meanwhile counts twice.
            room = self._config.engine.max_queued + scheduler.free
            if scheduler.queued + self._posted + wanted > room:
                raise Overloaded("the engine's queue is full", retry_after=1)
            if not loop.post(partial(self._add, parts, submission)):
                raise EngineGone("The engine of this replica is stopping.", retry_after=1)
            self._submissions[request_id] = submission
            self._posted += wanted

    def _add(self, parts: Parts, submission: Submission) -> None:
        with self._lock:
            for sequence in submission.sequences:
                parts.stepper.scheduler.add(sequence)
            self._posted -= len(submission.sequences)

    def _forget(self, request_id: str, submission: Submission) -> None:
        with self._lock:
            if self._submissions.get(request_id) is submission:
                del self._submissions[request_id]

    def _send(self, loop: StepLoop, submission: Submission, item: Chunk | ServeError) -> None:
        if isinstance(item, Chunk) and item.token_ids:
            self._last_token = time.monotonic()
        loop.send(submission.loop, submission.receive, item)

    async def abort(self, request_id: str) -> bool:
        with self._lock:
            submission = self._submissions.get(request_id)
        if submission is None or self._parts is None or self._loop is None:
            return False
        self._loop.post(partial(_abort, self._parts, submission))
        return True

    # -- looking in ------------------------------------------------------------------------------------------------

    async def health(self) -> None:
        parts, loop = self._loaded()
        if self._dead is not None:
            raise EngineFailed(self._dead)
        if parts.stepper.faults >= _FAULTS:
            raise EngineFailed(f"the last {parts.stepper.faults} steps failed")
        submission = Submission(asyncio.get_running_loop())
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        sink = partial(loop.send, submission.loop, submission.receive)
        prompt = [min(parts.end_tokens, default=0)]
        submission.sequences.append(_sequence(parts, 0, prompt, params, 0, 1, sink, probe=True))
        if not loop.post(partial(parts.stepper.scheduler.add, submission.sequences[0])):
            raise EngineFailed("the step loop has ended")
        try:
            async for _ in submission.chunks():
                pass
        except asyncio.CancelledError:
            logger.warning("left without a token; the last step ended %.0f s ago", time.monotonic() - loop.beat)
            raise
        finally:
            loop.post(partial(_abort, parts, submission))

    def stats(self) -> EngineStats:
        parts = self._parts
        if parts is None:
            return EngineStats(0, 0, self._config.engine.max_running)
        running = [sequence for sequence in parts.stepper.scheduler.running if not sequence.probe]
        last = self._last_token
        return EngineStats(
            running=len(running),
            queued=parts.stepper.scheduler.queued + self._posted,
            slots=self._config.engine.max_running,
            kv_tokens_used=sum(sequence.committed for sequence in running),
            kv_tokens_total=self._config.engine.max_running * parts.context,
            last_token_age_s=None if last is None else time.monotonic() - last,
        )

    def info(self) -> ModelInfo:
        parts, _ = self._loaded()
        # The draw is a function of seed and position alone (`sampler`).
        return ModelInfo(self._config.model.id, parts.context, parts.vocab, self._created, continues="seeded")

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        parts, _ = self._loaded()
        return await asyncio.to_thread(parts.prompts.encode, request)

    async def detokenize(self, token_ids: Seq[int]) -> str:
        parts, _ = self._loaded()
        check_tokens(token_ids, parts.vocab)
        return await asyncio.to_thread(parts.vocabulary.decode, token_ids)

    def _running(self) -> tuple[Parts, StepLoop]:
        parts, loop = self._loaded()
        if self._dead is not None or not loop.alive:
            raise EngineGone("The engine of this replica has died.", retry_after=1)
        return parts, loop

    def _loaded(self) -> tuple[Parts, StepLoop]:
        """Whether it lives or has died."""
        if self._parts is None or self._loop is None:
            raise EngineGone("The engine of this replica is not running.", retry_after=1)
        return self._parts, self._loop


def _died() -> ReplicaLost:
    return ReplicaLost("The engine died while it worked on this request.", retry_after=1)


def _sequence(
    parts: Parts,
    index: int,
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    max_tokens: int,
    sink: Sink,
    probe: bool = False,
) -> Sequence:
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else parts.end_tokens)
    ends = frozenset(token for token in ends if 0 <= token < parts.vocab)
    text = TextStream(params, make_detokenizer(parts.vocabulary), max_tokens, parts.end_tokens)
    rules = LogitRules(params, prompt, parts.vocab, ends, parts.device)
    return Sequence(index, prompt, params, seed, text, sink, max_tokens, probe, rules)


def _abort(parts: Parts, submission: Submission) -> None:
    for sequence in submission.sequences:
        parts.stepper.abort(sequence)


def _abort_all(parts: Parts) -> None:
    for sequence in parts.stepper.scheduler.everything():
        parts.stepper.abort(sequence)
