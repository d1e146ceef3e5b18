"""The HTTP routes, and the OpenAPI document that describes them.

Bodies are read and validated by hand, for exact limits and OpenAI's error shape; the document's request schemas come
from the same models.

What this module does not do: Ray; it runs over any `Backend`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from serve_app import __version__
from serve_app.engines.base import ModelInfo
from serve_app.errors import MethodNotAllowed, ModelNotFound, RouteNotFound, ServeError
from serve_app.exporter import scrape
from serve_app.exposition import merge
from serve_app.ingress.direct import Direct
from serve_app.ingress.generation import Gateway, Generation, is_ready
from serve_app.ingress.limits import bounded, deadline, read_body
from serve_app.ingress.scope import Record, RequestScope
from serve_app.ingress.server_info import server_info
from serve_app.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    answers,
    chat_job,
    check_token_ids,
    completion_job,
    parse_object,
    tokenize_request,
    validate,
)

logger = logging.getLogger("ray.serve.ddtree.ingress")
REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
GENERATIONS = "/v1/chat/completions", "/v1/completions"
SESSION_HEADER, MAX_SESSION_CHARS = "x-session-id", 256
MAX_QUOTED_CHARS = 100
_SCHEMAS = "#/components/schemas/{model}"
Wire = TypeVar("Wire", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
T = TypeVar("T")


def create_app(gateway: Gateway, *, sets_request_id: bool = True, direct: bool = True) -> FastAPI:
    """The application over `gateway`; see `RequestScope` for `sets_request_id`. `direct`: whether generations skip
    FastAPI's own layers, which makes no difference to a client."""
    app = Direct(
        title="DDTree Serve", version=__version__, openapi_url=None, docs_url=None, redoc_url=None,
        redirect_slashes=False, responses=_errors(404, 405, 500),
    )  # fmt: skip
    scope = partial(RequestScope, metrics=gateway.metrics, sets_request_id=sets_request_id, tracer=gateway.tracer)
    app.add_middleware(scope)
    app.add_exception_handler(HTTPException, _http_exception)
    _add_generation(app, gateway)
    if direct:
        for path in GENERATIONS:
            app.lead(path, scope)
    _add_models(app, gateway)
    _add_tokens(app, gateway)
    _add_operations(app, gateway)
    _add_document(app)
    return app


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    limits = gateway.config.ingress

    @app.post(GENERATIONS[0], **_documented(ChatRequest, answers.ChatCompletion, stream=True))
    async def chat_completions(request: Request) -> Response:
        wire, record, until = await _read(gateway, request, ChatRequest)
        record.stream = bool(wire.stream)
        make_job = partial(chat_job, wire, max_choices=limits.max_choices, max_messages=limits.max_messages)
        return Generation(gateway, record, until, make_job)

    @app.post(GENERATIONS[1], **_documented(CompletionRequest, answers.TextCompletion, stream=True))
    async def completions(request: Request) -> Response:
        wire, record, until = await _read(gateway, request, CompletionRequest)
        record.stream = bool(wire.stream)
        make_job = partial(completion_job, wire, max_choices=limits.max_choices, max_prompts=limits.max_prompts)
        return Generation(gateway, record, until, make_job)


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    async def card(request: Request) -> dict[str, Any]:
        info = await _short(gateway, request, gateway.backend.info)
        return {
            "id": info.id, "object": "model", "created": info.created, "owned_by": info.owned_by,
            "max_model_len": info.max_model_len,
        }  # fmt: skip

    @app.get("/v1/models", responses=_answer(answers.ModelList) | _errors(400, 401, 503))
    async def models(request: Request) -> Response:
        record = await _identified(gateway, request)
        cards = [await card(request)] if record.caller.may_use(gateway.config.model.id) else []
        return _json({"object": "list", "data": cards})

    @app.get("/v1/models/{model_id:path}", responses=_answer(answers.ModelCard) | _errors(400, 401, 503))
    async def model(request: Request, model_id: str) -> Response:
        await _identified(gateway, request)
        _known(gateway, request, model_id)
        return _json(await card(request))


def _add_tokens(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/tokenize", **_documented(TokenizeRequest, answers.Tokens))
    async def tokenize(request: Request) -> Response:
        wire, _, _ = await _read(gateway, request, TokenizeRequest)

        async def call() -> tuple[list[int], ModelInfo]:
            info = await gateway.backend.info()
            job = tokenize_request(wire, info, max_messages=gateway.config.ingress.max_messages)
            return await gateway.backend.tokenize(job), info

        tokens, info = await _short(gateway, request, call)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": info.max_model_len})

    @app.post("/detokenize", **_documented(DetokenizeRequest, answers.Text))
    async def detokenize(request: Request) -> Response:
        wire, _, _ = await _read(gateway, request, DetokenizeRequest)

        async def call() -> str:
            check_token_ids(wire.tokens, await gateway.backend.info(), "tokens")
            return await gateway.backend.detokenize(wire.tokens)

        return _json({"prompt": await _short(gateway, request, call)})


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=_answer(answers.Status))
    async def health() -> Response:
        """This process answers."""
        return _json({"status": "ok"})

    @app.head("/ready", include_in_schema=False)  # some load balancers probe with it
    @app.get("/ready", responses=_answer(answers.Status) | _errors(503))
    async def ready(request: Request) -> Response:
        """A replica generated lately, or does now."""
        await _short(gateway, request, partial(is_ready, gateway))
        return _json({"status": "ok"})

    @app.get("/version", responses=_answer(answers.Version))
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/server_info", responses=_answer(answers.ServerInfo) | _errors(400, 401, 503))
    async def about(request: Request) -> Response:
        """What benchmark tools ask for: the configuration, and each engine's mean acceptance length."""
        await _identified(gateway, request)
        info = await _short(gateway, request, gateway.backend.info)
        return _json(server_info(gateway.config, info, (await _metrics(gateway)).decode()))

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """Every process's series, in Prometheus's text format."""
        return Response(await _metrics(gateway), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/-/prometheus/targets", responses=_answer(answers.Targets) | _errors(503))
    async def targets(request: Request) -> Response:
        """Every process's exporter, in the format of Prometheus's HTTP service discovery."""
        return _json(await _short(gateway, request, gateway.backend.targets))


def _add_document(app: FastAPI) -> None:
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]

    # FastAPI's own would be no route of an API to it, and so have no label in the metrics.
    @app.head("/openapi.json", include_in_schema=False)
    @app.get("/openapi.json", include_in_schema=False)
    async def document(request: Request) -> Response:
        prefix = request.scope.get("root_path", "").rstrip("/")
        return _json(app.openapi() | ({"servers": [{"url": prefix}]} if prefix else {}))


async def _metrics(gateway: Gateway) -> bytes:
    timeout_s = gateway.config.metrics.scrape_timeout_s
    pages: dict[str, str] = {}
    try:
        pages = await asyncio.wait_for(gateway.backend.pages(), timeout_s)
    except (TimeoutError, ServeError) as error:
        # Half a page is better than none: this process's own series need nobody.
        logger.warning("exporter directory does not answer: %s", type(error).__name__)
    pages.pop(gateway.name, None)
    texts = await scrape(pages, timeout_s)
    return merge({gateway.name: generate_latest(gateway.registry).decode(), **texts})


async def _read(gateway: Gateway, request: Request, wire: type[Wire]) -> tuple[Wire, Record, float]:
    record = await _identified(gateway, request)
    until = deadline(record, request.headers, gateway.config.ingress.request_timeout_s)
    raw = await read_body(request, gateway.config.ingress.max_body_bytes, until)
    record.body_bytes = len(raw)
    record.session = request.headers.get(SESSION_HEADER, "")[:MAX_SESSION_CHARS]
    body = parse_object(raw)
    if isinstance(body.get("model"), str):
        _known(gateway, request, body["model"])
    elif not wire.model_fields["model"].is_required():
        _known(gateway, request, gateway.config.model.id)
    return validate(wire, body), record, until


async def _identified(gateway: Gateway, request: Request) -> Record:
    """Before the body is read: strangers, and those over their rate, cost nothing more."""
    record: Record = request.state.record
    record.caller = await gateway.admission.identify(request.headers)
    record.priority = gateway.admission.priority(record.caller, request.headers)
    if request.method == "POST":
        gateway.admission.count_request(record.caller)
    return record


def _known(gateway: Gateway, request: Request, model: str) -> None:
    # To a key that may not use it a model does not exist.
    if model != gateway.config.model.id or not request.state.record.caller.may_use(model):
        message = f"The model {_quoted(model)} does not exist; GET /v1/models lists what is served."
        raise ModelNotFound(message, param="model")
    request.state.record.model = model


async def _short(gateway: Gateway, request: Request, call: Callable[[], Awaitable[T]]) -> T:
    until = deadline(request.state.record, request.headers, gateway.config.ingress.request_timeout_s)
    async with bounded(request.receive, until):
        return await call()


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure: ServeError
    if error.status_code == 405:
        failure = MethodNotAllowed("This route does not offer the method.")
    elif error.status_code == 404:
        path = _quoted(request.scope["path"])
        failure = RouteNotFound(f"There is no such route: {path}. The API is under /v1; GET /openapi.json lists it.")
    else:
        raise ServeError("The server failed on this request.") from error
    request.state.record.error = failure
    headers = {**(error.headers or {}), **failure.headers()}
    if error.status_code == 405:  # Starlette tells those of the path's first route alone
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return Response(orjson.dumps(failure.body()), failure.status, headers, "application/json")


def _methods(request: Request) -> set[str]:
    """Those that the path offers."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found


def _quoted(text: str) -> str:
    """What a client asked for, at a length and in characters fit for an answer."""
    shown = text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _answer(model: type) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "description": "The answer."}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": answers.ErrorEnvelope, "description": "An error."} for status in statuses}


def _documented(wire: type, answer: type, *, stream: bool = False) -> dict[str, Any]:
    responses = _answer(answer) | _errors(400, 401, 404, 413, 415, 429, 503, 504)
    if stream:
        responses[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    schema = {"$ref": _SCHEMAS.format(model=wire.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": responses, "openapi_extra": {"requestBody": body}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, requests = models_json_schema([(model, "validation") for model in REQUESTS], ref_template=_SCHEMAS)
        document["components"]["schemas"].update(requests["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
