"""Which drafter an engine loads, told from the configuration alike for every engine.

What this module does not do: read the drafter's files (the engines do), or look for them (`models`).
"""

from __future__ import annotations

from pathlib import Path

from serve_app.config import Config
from serve_app.errors import ConfigError
from serve_app.models import ModelFiles, resolve_drafter


def drafter_path(config: Config, files: ModelFiles) -> Path | None:
    """Where the drafter lies that the configuration calls for, None to decode without.

    Raises:
        ConfigError: a chain is wanted and no drafter fits. ModelFetchError: its files cannot be had.
    """
    method = config.speculation.method
    # The budget is the tree's; a chain is as long as the block.
    drafts = method == "chain" or (method == "ddtree" and config.speculation.budget != 0)
    where = resolve_drafter(config.model.drafter, files) if drafts else None
    if where is None and method == "chain":
        raise ConfigError("speculation.method chain needs a drafter; none fits the model", param="model.drafter")
    return where
