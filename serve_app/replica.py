"""The deployment that owns one engine: lifecycle, generation as finished frames, health, drain.

It is healthy only when its engine can generate: the constructor waits for the warm-up, and then a watchdog generates.
API errors leave it as data (`Item.error`, `Reply.error`), since exceptions that cross a handle arrive wrapped, and are
logged by Ray as crashes.

What this module does not do: HTTP, routing, validation.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.exceptions import RayServeException

from serve_app.channel import Outlets, Parcel, Ticket
from serve_app.config import Config
from serve_app.engines.base import Chunk, Engine, GenerateRequest, ModelInfo
from serve_app.entrance import own_entrance
from serve_app.errors import ConfigError, EngineFailed, NotReady, ServeError
from serve_app.exporter import Exporter
from serve_app.logs import adopt_library
from serve_app.protocol import Item, Job, Progress, Renderer, Work, error_frames, open_work
from serve_app.scaling import BUSY, TTFT, FirstTokens, busy
from serve_app.topology import READ_NODE, preflight
from serve_app.tracing import make_tracer
from serve_app.watchdog import Watchdog, prove

logger = logging.getLogger("ray.serve.ddtree.replica")

ENGINE_FACTORY = "serve_app.engines:create_engine"
Event = tuple[int, Chunk | Exception | None]


class Events:
    """What a job's prompts made, for one reader, which always takes all of it."""

    def __init__(self) -> None:
        self._made: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self._made.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def all(self) -> list[Event]:
        """What there is, once there is something."""
        if not self._made:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        made, self._made = self._made, []
        return made


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a short call: a value, or the error a client shall see."""

    value: Any = None
    error: ServeError | None = None


class Replica:
    """See the module. `engine_factory` is `module:function`, called with (Config, CollectorRegistry); `read_node`
    likewise, called with nothing, gives the NodeFacts."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self, config: Config, engine_factory: str = ENGINE_FACTORY, exporters: Any = None, read_node: str = READ_NODE
    ) -> None:
        # Before anything is loaded: Serve's status shows what a wrong node lacks.
        preflight(config, load(read_node))
        self._config = config
        adopt_library()
        self._id, name = _own_names()
        self._tracer = make_tracer(config.tracing, name)
        self._registry = CollectorRegistry()
        self._engine: Engine = load(engine_factory)(config, self._registry)
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.stop()
            raise
        self._watchdog = Watchdog(self._engine, config.replica)
        self._watchdog.start()
        self._first_tokens = FirstTokens(config.autoscaling.look_back_s)
        self._exporter: Exporter | None = None
        self._outlets = Outlets()
        if exporters is not None:
            if config.ingress.channel:
                await self._outlets.open(ray.util.get_node_ip_address(), self._id, own_entrance())
            self._exporter = Exporter(self._registry, config.metrics, exporters, config.model.id)
            self._exporter.start()

    async def generate(self, job: Job) -> AsyncIterator[Item]:
        """Run the job's prompts concurrently. The first item is the outcome: data, or an error before any.

        Streams: the first chunk goes out at once, then everything that queued up meanwhile as one item; there are no
        timers. Without streaming, an empty item says that generation has begun, unless it has ended as well; the body
        follows at the end.
        Closing or cancelling aborts every prompt in the engine. A job that another replica began goes on behind what
        was sent.
        """
        queue = Events()
        self._note_arrival(job)
        tasks = [asyncio.create_task(self._pump(work, queue, job)) for work in open_work(job.requests, job.sent)]
        key = object()
        self._first_tokens.arrived(key)
        try:
            async for item in (_stream if job.stream else _collect)(job, queue, len(tasks)):
                self._first_tokens.came(key)
                yield item
        except Exception as error:
            failure = self._as_serve_error(error, job)
            # The frames are for a client that already has some; a first item is answered by its error alone.
            said = error_frames(failure) if job.stream else b""
            yield Item(data=said, error=failure, replica=self._id, last=True)
        finally:
            self._first_tokens.left(key)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(self, job: Job, ticket: Ticket) -> AsyncIterator[Parcel]:
        """`generate`, whose items leave by the ticket's channel; what comes out here are those that do not."""
        async with contextlib.aclosing(self._outlets.carry(self.generate(job), ticket)) as parcels:  # type: ignore[type-var]
            async for parcel in parcels:
                yield parcel

    def _note_arrival(self, job: Job) -> None:
        if self._tracer is not None:
            self._tracer.route(job.origin, time.time_ns())
        if self._config.logging.prompts:
            for request in job.requests:
                prompt = request.prompt or request.prompt_token_ids or request.messages
                fields = {"request_id": job.origin.request_id, "prompt": prompt}
                logger.info("prompt of %s: %s", job.id, prompt, extra=fields)

    async def _pump(self, work: Work, queue: Events, job: Job) -> None:
        prompt, choice, request = work
        try:
            async with contextlib.aclosing(self._engine.submit(request)) as chunks:  # type: ignore[type-var]
                async for made in chunks:
                    chunk = made if choice is None else replace(made, index=choice)
                    queue.put((prompt, chunk))
                    if self._tracer is not None and chunk.trail is not None:
                        self._tracer.choice(job.origin, chunk)
        except Exception as error:
            queue.put((prompt, error))
        else:
            queue.put((prompt, None))

    def _as_serve_error(self, error: Exception, job: Job) -> ServeError:
        if isinstance(error, ServeError):
            return error
        # The text may hold anything the engine knew, prompts included: it goes to the log's traceback only.
        logger.error(
            "engine failed on request %s (%s)", job.origin.request_id, job.id, exc_info=error,
            extra={"request_id": job.origin.request_id},
        )  # fmt: skip
        return EngineFailed("The engine failed while it worked on this request.")

    async def info(self) -> ModelInfo:
        return self._engine.info()

    async def tokenize(self, request: GenerateRequest) -> Reply:
        return await self._reply(lambda: self._engine.tokenize(request))

    async def detokenize(self, token_ids: Sequence[int]) -> Reply:
        return await self._reply(lambda: self._engine.detokenize(token_ids))

    async def _reply(self, call: Callable[[], Awaitable[Any]]) -> Reply:
        try:
            return Reply(value=await call())
        except ServeError as error:
            return Reply(error=error)
        except Exception as error:
            logger.error("engine failed", exc_info=error)
            return Reply(error=EngineFailed("The engine failed while it worked on this request."))

    async def probe(self, max_age_s: float, timeout_s: float) -> Reply:
        """Whether a token came within `max_age_s`, or comes now within `timeout_s`."""
        try:
            await prove(self._engine, max_age_s, timeout_s)
        except Exception as error:
            logger.warning("readiness probe failed", exc_info=error)
            return Reply(error=NotReady("The engine does not generate."))
        return Reply(value=True)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve now and then, for the routers."""
        return {"healthy": self._watchdog.failure is None, "kv_tokens": self._engine.stats().kv_tokens_total}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the number of replicas follows the load."""
        found, late = {BUSY: busy(self._engine.stats())}, self._first_tokens.late()
        return found if late is None else {**found, TTFT: late}

    async def check_health(self) -> None:
        """Called by Serve, beside the request path. Raises when the engine neither generated lately nor could."""
        if self._watchdog.failure is not None:
            raise self._watchdog.failure

    async def __del__(self) -> None:  # Serve awaits it after the drain
        if outlets := getattr(self, "_outlets", None):
            await outlets.close()
        if exporter := getattr(self, "_exporter", None):
            await exporter.stop()
        if watchdog := getattr(self, "_watchdog", None):
            await watchdog.stop()
        if hasattr(self, "_engine"):
            await self._engine.stop()
        if getattr(self, "_tracer", None) is not None:
            await asyncio.to_thread(self._tracer.close)  # type: ignore[union-attr]


def _own_names() -> tuple[str, str]:
    """As routers and as metrics name this replica; outside of Serve there is only one."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return "", "engine"
    return context.replica_tag, f"{context.deployment}#{context.replica_tag}"


def load(path: str) -> Callable[..., Any]:
    """The object that `module:name` names. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {path}: {error}", param="engine.kind") from error


async def _stream(job: Job, queue: Events, running: int) -> AsyncIterator[Item]:
    renderer, tokens = Renderer(job), 0
    progress: list[Progress] = []
    if not running:  # all was said but the end
        yield Item(data=renderer.end(), last=True)
    while running:
        events = await queue.all()
        data: list[bytes] = []
        content = False
        failure: Exception | None = None
        for prompt, event in events:
            if isinstance(event, Chunk):
                if event.finish_reason == "abort":
                    failure = _aborted()
                    break
                data.append(renderer.frame(prompt, event))
                progress.append(renderer.progress(prompt, event))
                tokens += len(event.token_ids)
                content = content or bool(event.text or event.delta)
            elif event is None:
                running -= 1
            else:
                failure = event
                break
        if not running:
            data.append(renderer.end())
        joined = b"".join(data)
        if joined:
            ended = not running and failure is None
            yield Item(data=joined, tokens=tokens, content=content, progress=tuple(progress), last=ended)
            progress, tokens = [], 0
        if failure is not None:
            raise failure


async def _collect(job: Job, queue: Events, running: int) -> AsyncIterator[Item]:
    renderer, tokens, begun = Renderer(job), 0, False
    progress: list[Progress] = []
    while running:
        for prompt, event in await queue.all():
            if isinstance(event, Chunk):
                if event.finish_reason == "abort":
                    raise _aborted()
                renderer.collect(prompt, event)
                if event.finish_reason is not None:
                    progress.append(renderer.progress(prompt, event))
                tokens += len(event.token_ids)
            elif event is None:
                running -= 1
            else:
                raise event
        if tokens and running and not begun:
            begun = True
            yield Item(tokens=tokens)
            tokens = 0
    yield Item(data=renderer.body(), tokens=tokens, content=True, progress=tuple(progress), last=True)


def _aborted() -> ServeError:
    return NotReady("The request was aborted by the server, which is shutting down.", code="aborted")
