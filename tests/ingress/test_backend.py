"""What a call to a replica may end with, over actor calls and over gRPC, as errors that a client can see."""

import asyncio
import contextlib
import contextvars

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from serve_app.engines.base import ModelInfo
from serve_app.errors import EngineFailed, NoReplicas, NotReady, Overloaded, ServeError
from serve_app.ingress.backend import HandleBackend, _ray_errors

INFO = ModelInfo("m", max_model_len=10, vocab_size=10, created=0)
REQUEST: contextvars.ContextVar[str | None] = contextvars.ContextVar("REQUEST", default=None)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
        (ActorUnavailableError("gone", None), NotReady),
        (DeploymentUnavailableError("d"), NoReplicas),
        (asyncio.CancelledError(), NotReady),
        (RequestCancelledError("r"), NotReady),
        (ReplicaUnavailableError("r"), EngineFailed),
        (TaskCancelledError(), EngineFailed),
        (AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata()), EngineFailed),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_every_way_a_call_ends_is_an_error_of_ours(raised: BaseException, expected: type[ServeError]) -> None:
    with pytest.raises(expected), _ray_errors():
        raise raised


async def test_the_callers_own_cancellation_is_passed_on() -> None:
    async def call() -> None:
        with _ray_errors():
            await asyncio.sleep(60)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_replica_that_still_loads_is_not_waited_for_without_end() -> None:
    asked = Asked()
    backend = HandleBackend(asked, asked, patience_s=0.01)  # type: ignore[arg-type]
    with pytest.raises(NotReady) as refused:
        await backend.info()
    assert refused.value.retryable and refused.value.retry_after == 0.01


async def test_those_who_wait_share_one_question_which_outlives_each_of_them() -> None:
    asked = Asked()
    backend = HandleBackend(asked, asked, patience_s=60)  # type: ignore[arg-type]
    REQUEST.set("the first")
    first, *others = [asyncio.create_task(backend.info()) for _ in range(10)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    asked.answer.set_result(INFO)
    assert first.cancelled() and await asyncio.gather(*others) == [INFO] * 9
    assert await backend.info() is INFO and asked.contexts == [None]


async def test_a_question_that_failed_is_asked_again() -> None:
    asked = Asked()
    backend = HandleBackend(asked, asked, patience_s=60)  # type: ignore[arg-type]
    asked.answer.set_exception(DeploymentUnavailableError("d"))
    with pytest.raises(NoReplicas):
        await backend.info()
    asked.answer = asyncio.get_running_loop().create_future()
    asked.answer.set_result(INFO)
    assert await backend.info() is INFO and len(asked.contexts) == 2


async def test_a_replica_that_hangs_is_not_the_only_one_asked() -> None:
    asked = Hangs()
    backend = HandleBackend(asked, asked, patience_s=0.05)  # type: ignore[arg-type]
    for _ in range(100):  # any of them may be too slow here for its patience
        with contextlib.suppress(NotReady):
            assert await backend.info() is INFO
            return
    raise AssertionError(f"{len(asked.contexts)} questions, and no answer")


class Asked:
    """A handle whose calls are answered with `answer`; in whose context each was made."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self.contexts: list[str | None] = []

    def options(self, **options: object) -> "Asked":
        return self

    @property
    def info(self) -> "Asked":
        return self

    def remote(self) -> asyncio.Future[ModelInfo]:
        self.contexts.append(REQUEST.get())
        return asyncio.shield(self.answer)  # a caller that gives up ends its own call


class Hangs(Asked):
    """Whom the first call meets never answers."""

    def remote(self) -> asyncio.Future[ModelInfo]:
        if self.contexts and not self.answer.done():
            self.answer = asyncio.get_running_loop().create_future()
            self.answer.set_result(INFO)
        return super().remote()
