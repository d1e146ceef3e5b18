"""Engines: `base` is the seam, `create_engine` the only place that knows which ones exist.

Importing this package imports no engine: the ingress needs the seam's types, and must start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from serve_app.config import Config
    from serve_app.engines.base import Engine


def create_engine(config: Config, registry: CollectorRegistry) -> Engine:
    """The engine that `config.engine.kind` names, not started. Its series go to `registry`.

    Raises:
        ConfigError: the configuration cannot be used with this engine.
    """
    if config.engine.kind == "sglang":
        from serve_app.engines.sglang.engine import SglangEngine

        return SglangEngine(config, registry)
    from serve_app.engines.local.engine import LocalEngine

    return LocalEngine(config, registry)
