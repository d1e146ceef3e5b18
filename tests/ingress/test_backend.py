"""What a call to a replica may end with, over actor calls and over gRPC, as errors that a client can see."""

import asyncio

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

from serve_app.errors import EngineFailed, NotReady, Overloaded, ServeError
from serve_app.ingress.backend import HandleBackend, _ray_errors


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
        (ActorUnavailableError("gone", None), NotReady),
        (DeploymentUnavailableError("d"), NotReady),
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
    loading = Loading()
    backend = HandleBackend(loading, loading, patience_s=0.01)  # type: ignore[arg-type]
    with pytest.raises(NotReady) as refused:
        await backend.info()
    assert refused.value.retryable and refused.value.retry_after == 0.01


class Loading:
    """A handle whose calls are never answered."""

    def options(self, **options: object) -> "Loading":
        return self

    @property
    def info(self) -> "Loading":
        return self

    async def remote(self) -> None:
        await asyncio.Event().wait()
