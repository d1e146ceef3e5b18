"""The application on fake engines and fake node facts, as a builder that a Serve configuration can name."""

from typing import Any

from ray.serve import Application

from serve_app.build import bind
from serve_app.config import load_config
from tests.conftest import FAKE_ENGINE


def build_app(args: dict[str, Any]) -> Application:
    return bind(load_config(args, use_env=False), FAKE_ENGINE, "tests.fake_node:read")
