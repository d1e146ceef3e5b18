"""The HTTP side over a replica in the same process: everything but Ray."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from serve_app.admission import Admission
from serve_app.config import load_config
from serve_app.engines.base import GenerateRequest, ModelInfo
from serve_app.ingress.generation import Gateway
from serve_app.ingress.routes import create_app
from serve_app.metrics import GatewayMetrics
from serve_app.protocol import Item, Job
from serve_app.replica import Replica, Reply
from tests.conftest import FAKE_ENGINE, SOON_S


class DirectBackend:
    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def generate(self, job: Job) -> AsyncIterator[Item]:
        return self.replica.generate(job)

    async def info(self) -> ModelInfo:
        return await self.replica.info()

    async def probe(self, max_age_s: float, timeout_s: float) -> None:
        _value(await self.replica.probe(max_age_s, timeout_s))

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        return _value(await self.replica.tokenize(request))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return _value(await self.replica.detokenize(token_ids))

    async def pages(self) -> dict[str, str]:
        return {}

    async def targets(self) -> list[dict[str, Any]]:
        return []


def _value(reply: Reply) -> Any:
    if reply.error is not None:
        raise reply.error
    return reply.value


class LocalReplica(Replica):
    """Without the finaliser that Serve awaits: the interpreter would drop its coroutine, with a warning."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def make_replica(config: dict[str, Any] | None = None) -> Replica:
    """A started replica on a fake engine."""
    tree = load_config({"model": {"id": "fake"}, **(config or {})}, use_env=False)
    replica = LocalReplica.__new__(LocalReplica)
    await replica.__init__(tree, FAKE_ENGINE)  # type: ignore[misc]
    return replica


async def make_gateway(config: dict[str, Any] | None = None, clock: Callable[[], float] = time.monotonic) -> Gateway:
    """`clock`: admission's."""
    replica = await make_replica(config)
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    admission = Admission(replica._config.admission, metrics, clock=clock)
    return Gateway(replica._config, DirectBackend(replica), registry, metrics, admission)


async def until(condition: Callable[[], bool]) -> None:
    """Fails after `SOON_S`."""
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.001)


def counted(of: Gateway | Replica, series: str) -> float:
    """A series of the fake engine."""
    replica = of if isinstance(of, Replica) else of.backend.replica  # type: ignore[attr-defined]
    return float(replica._registry.get_sample_value(series) or 0)


@asynccontextmanager
async def direct_client(gateway: Gateway | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(gateway or await make_gateway())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
