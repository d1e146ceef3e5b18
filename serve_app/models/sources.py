"""From what the configuration calls a model to a directory that an engine can load.

A source is, in this order: a known name, a local directory (it begins with `/`, `.` or `~`, or exists), a Hugging Face
id `org/name`. Checks that a directory is complete; does not load anything.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.errors import ModelFetchError
from serve_app.models import cache, fetch, registry, weights
from serve_app.models.hub import fetch_hub

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("tiktoken.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class ModelFiles:
    """A complete model directory.

    Attributes:
        path: absolute; holds config.json, *.safetensors and a tokenizer.
        name: the known name, the Hugging Face id, or the directory's name.
        known: name in the registry if the files are a known model's (also when reached by path), else None.
    """

    path: Path
    name: str
    known: str | None = None


def resolve(
    source: str, *, progress: bool = True, force: bool = False, cache_dir: str | os.PathLike[str] | None = None
) -> ModelFiles:
    """Find a model, fetching and converting it first where needed.

    Args:
        source: known name, local directory or Hugging Face id.
        progress: show bars on a terminal.
        force: make a known model again even if the cached one looks whole.
        cache_dir: instead of the cache that the environment names.

    Raises:
        ModelFetchError: one line that says what is wrong, and where it can, what to do.
    """
    if model := registry.find(source):
        path = fetch.fetch_known(model, cache.cache_root(cache_dir), force=force, progress=progress)
        return ModelFiles(path, model.name, known=model.name)
    if is_local(source):
        path = local_path(source)
        check_model(path)
        known = _known_at(path)
        return ModelFiles(path, known or path.name, known=known)
    if is_hub_id(source):
        path = fetch_hub(source, cache.cache_root(cache_dir), progress=progress)
        check_model(path)
        return ModelFiles(path, source)
    raise unknown(source)


def check_source(source: str) -> None:
    """Raise a ModelFetchError for a source that cannot be had, as far as that can be told without fetching it."""
    if registry.find(source) is not None:
        return
    if is_local(source):
        check_model(local_path(source))
    elif not is_hub_id(source):
        raise unknown(source)


def unknown(source: str) -> ModelFetchError:
    """The error for a source that is nothing we know."""
    names = ", ".join(model.name for model in registry.all_known())
    return ModelFetchError(
        f"{source[:200]!r} is neither a known model ({names}), nor a directory, nor a Hugging Face id (org/name)"
    )


def is_local(source: str) -> bool:
    """Whether a source means a path, existing or not."""
    return source.startswith(("/", ".", "~")) or os.path.exists(source)


def is_hub_id(source: str) -> bool:
    """Whether a source has the form of a Hugging Face id."""
    return _HUB_ID.fullmatch(source) is not None


def local_path(source: str) -> Path:
    """The absolute path of an existing local directory.

    Raises:
        ModelFetchError: it does not exist, is a file, or cannot be read.
    """
    try:
        path = Path(source).expanduser().absolute()
    except RuntimeError:
        raise ModelFetchError(f"{source}: no such home directory") from None
    # os.path says no where Path raises: names that are too long, parents that may not be searched.
    if not os.path.exists(path):
        raise ModelFetchError(f"{path} does not exist")
    if not path.is_dir():
        raise ModelFetchError(f"{path} is a file; give the directory that holds config.json and *.safetensors")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelFetchError(f"{path} cannot be read: permission denied")
    return path


def check_model(path: Path) -> None:
    """Raise a ModelFetchError that names everything missing or damaged in a model directory."""
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not (path / weights.INDEX).is_file() and not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)")
    if missing:
        raise ModelFetchError(f"{path} is not a complete model; it lacks {', '.join(missing)}")
    read_config(path)
    weights.check_directory(path)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        ModelFetchError: missing, unreadable, or not a JSON object.
    """
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ModelFetchError(f"{path} has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelFetchError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelFetchError(f"{path / 'config.json'} must hold a JSON object")
    return config


def _known_at(path: Path) -> str | None:
    name = (cache.read_manifest(path) or {}).get("name")
    return name if isinstance(name, str) and registry.find(name) else None
