"""docs/api.md names every field and every error code."""

from pathlib import Path

import pytest

from serve_app import errors
from serve_app.protocol import ChatRequest, CompletionRequest

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()
NOT_OF_THE_API = {"invalid_config", "model_fetch_failed"}
CODES = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.ServeError)}


@pytest.mark.parametrize("field", sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))
def test_every_field_is_documented(field: str) -> None:
    assert f"`{field}`" in TEXT or f"`{field}." in TEXT


@pytest.mark.parametrize("code", sorted(code for code in CODES if code and code not in NOT_OF_THE_API))
def test_every_code_is_documented(code: str) -> None:
    assert code in TEXT
