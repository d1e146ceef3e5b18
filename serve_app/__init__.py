"""DDTree Serve: `serve run serve_app:app`.

`app` (a bound Serve application built from the environment's configuration) is made on first access, so that
importing the package stays light: SGLang loads plugin modules of it in processes that must not import Ray Serve.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "app":
        from serve_app.build import app_from_env

        return app_from_env()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
