"""Requests made up from the application's own OpenAPI document: never a 5xx, always the envelope."""

import asyncio
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from serve_app.ingress.routes import create_app
from tests.direct import make_gateway

CONFIG = schemathesis.Config.from_dict({"generation": {"mode": "all"}})


APP = create_app(asyncio.run(make_gateway()))
schema = schemathesis.openapi.from_asgi("/openapi.json", APP, config=CONFIG)


@schema.parametrize()
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_document_and_the_answers_agree(case: Any) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["code"] is None or isinstance(error["code"], str)
    # What depends on other fields or on the model (ids below its vocabulary) cannot be said in a schema.
    case.validate_response(response, excluded_checks=[positive_data_acceptance])


def test_every_request_model_is_described() -> None:
    schemas = APP.openapi()["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", "ErrorEnvelope"} <= set(schemas)
    assert schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


def test_every_route_documents_its_errors() -> None:
    for path, methods in APP.openapi()["paths"].items():
        for method, operation in methods.items():
            assert {"404", "405", "500"} <= set(operation["responses"]), f"{method} {path}"
