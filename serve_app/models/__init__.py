"""How models and drafters are found, fetched and converted; `cache.py` says where they are kept.

Loads no model and imports no torch. Command line: `python -m serve_app.models --help`.
"""

from serve_app.models.drafter import resolve_drafter
from serve_app.models.sources import ModelFiles, resolve

__all__ = ["ModelFiles", "resolve", "resolve_drafter"]
