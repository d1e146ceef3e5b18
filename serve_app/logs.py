"""How this application's processes log: text or JSON, and never a prompt unless asked for.

Serve's own handlers do the writing: records of loggers below `ray.serve` reach them, with the request's id. What a
record says beside its message goes into `extra`, which the JSON format turns into fields.

What this module does not do: decide what is logged.
"""

from __future__ import annotations

import logging
from typing import Any

from serve_app.config import LogConfig

_SERVE = "ray.serve"
_LIBRARY = "serve_app"


def serve_options(config: LogConfig, **more: Any) -> dict[str, Any]:
    """`logging_config` of a deployment."""
    return {"encoding": config.format.upper(), "log_level": config.level, **more}


def adopt_library() -> None:
    """Records of modules that know no Serve (engines, models) take the same way. Once per process."""
    library, serve = logging.getLogger(_LIBRARY), logging.getLogger(_SERVE)
    library.setLevel(serve.level)
    for handler in serve.handlers:
        if handler not in library.handlers:
            library.addHandler(handler)
