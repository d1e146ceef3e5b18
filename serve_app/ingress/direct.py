"""Generations skip what FastAPI does around a handler: it knows nothing of them that their own code does not do.

Its layers and its request handler take a tenth of a millisecond for every request, and pass every frame of a stream
through four functions more. The routes are still declared there, which describes them and answers all other requests.

What this module does not do: answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route, get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send


class Direct(FastAPI):
    """An application some of whose routes go straight to their endpoints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._direct: dict[tuple[str, str], ASGIApp] = {}

    def lead(self, path: str, around: Callable[[ASGIApp], ASGIApp]) -> None:
        """POST requests of `path`, which is declared already and whose endpoint takes the request alone, meet `around`
        and nothing else."""
        route = next(r for r in self.routes if isinstance(r, Route) and r.path == path and "POST" in (r.methods or ()))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            scope["route"] = route
            response = await route.endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self._direct["POST", path] = around(answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = None
        if scope["type"] == "http":
            direct = self._direct.get((scope["method"], get_route_path(scope)))
        if direct is None:
            await super().__call__(scope, receive, send)
        else:
            await direct(scope, receive, send)
