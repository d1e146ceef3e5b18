"""What a call to a replica may end with, over actor calls and over gRPC, as errors that a client can see."""

import asyncio

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from serve_app.errors import EngineFailed, NotReady, Overloaded, ServeError
from serve_app.ingress.backend import _ray_errors


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
        (ActorUnavailableError("gone", None), NotReady),
        (DeploymentUnavailableError("d"), NotReady),
        (asyncio.CancelledError(), NotReady),
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
