"""The HTTP side as a Serve deployment: `Ingress` binds the routes to the replicas' handle.

What this package does not do: generate, or place replicas.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.admission import Admission
from serve_app.config import Config
from serve_app.exporter import Exporter
from serve_app.ingress.backend import ChannelBackend, HandleBackend
from serve_app.ingress.generation import Gateway
from serve_app.ingress.routes import create_app
from serve_app.logs import adopt_library
from serve_app.metrics import GatewayMetrics
from serve_app.tracing import make_tracer

__all__ = ["Ingress"]


@serve.ingress()
class Ingress:
    """One process of the HTTP side. Replica facts are asked for on the first request, so that it is up, and says
    "not ready", while the engines still load."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self, config: Config, replicas: DeploymentHandle, exporters: DeploymentHandle
    ) -> None:
        registry = CollectorRegistry()
        metrics = GatewayMetrics(registry)
        scaling = config.autoscaling
        least = config.replica.num_replicas if scaling.max_replicas is None else scaling.min_replicas
        metrics.serves(config.model.id, least)
        patience_s = config.ingress.ready_timeout_s
        self._gateway = Gateway(
            config=config,
            backend=ChannelBackend(replicas, exporters, metrics, patience_s)
            if config.ingress.channel
            else HandleBackend(replicas, exporters, patience_s),
            registry=registry,
            metrics=metrics,
            admission=Admission(config.admission, metrics, config.ingress.num_replicas),
        )
        self._exporter = Exporter(registry, config.metrics, exporters, config.model.id)
        self._gateway.name = self._exporter.name
        self._exporter.start()
        self._gateway.tracer = make_tracer(config.tracing, self._exporter.name)
        adopt_library()

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's HTTP server puts x-request-id on every response itself.
        return create_app(self._gateway, sets_request_id=False)

    async def __del__(self) -> None:  # Serve awaits it after the drain
        if hasattr(self, "_exporter"):
            await self._exporter.stop()
        if hasattr(self, "_gateway") and self._gateway.tracer is not None:
            await asyncio.to_thread(self._gateway.tracer.close)
