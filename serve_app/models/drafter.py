"""Which drafter goes with a target, and whether its configuration fits; loading it is the engine's.

Format: SGLang's DFlashDraftModel (config.json with a `dflash_config`, safetensors, no tokenizer: a drafter shares the
target's vocabulary and embedding).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from serve_app.errors import ModelFetchError
from serve_app.models import cache, registry, weights
from serve_app.models.hub import fetch_hub
from serve_app.models.sources import ModelFiles, is_hub_id, is_local, local_path, read_config, unknown

log = logging.getLogger(__name__)

ARCHITECTURE = "DFlashDraftModel"


def resolve_drafter(
    source: str | None,
    target: ModelFiles,
    *,
    progress: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path | None:
    """The directory of the drafter for `target`, or None if nothing shall or can be drafted.

    Args:
        source: None; "auto" for the shipped drafter of a known target; a known name for the one shipped for it; a
            local directory; a Hugging Face id.

    Raises:
        ModelFetchError: an explicit source that is absent, or a drafter that does not fit the target.
    """
    if source is None:
        return None
    if source == "auto":
        path = shipped(target.known) if target.known else None
        if path is None:
            log.info("no drafter is shipped for %s; it is served without drafts", target.name)
            return None
    elif registry.find(source):
        path = shipped(source)
        if path is None:
            raise ModelFetchError(f"no drafter is shipped for {source}")
    elif is_local(source):
        path = local_path(source)
    elif is_hub_id(source):
        path = fetch_hub(source, cache.cache_root(cache_dir), progress=progress)
    else:
        raise unknown(source)
    check_drafter(path, target.path)
    return path


def shipped(name: str) -> Path | None:
    """The drafter inside this package for a known model, or None; a directory without weights counts as none."""
    model = registry.find(name)
    if model is None or model.drafter is None:
        return None
    path = Path(__file__).parent / model.drafter
    return path if any(path.glob("*.safetensors")) else None


def check_drafter(path: Path, target: Path) -> None:
    """Check a drafter directory against its target's configuration.

    Raises:
        ModelFetchError: naming the first key that is missing, has a wrong value, or does not fit.
    """
    config = read_config(path)
    if ARCHITECTURE not in (config.get("architectures") or []):
        found = config.get("architectures")
        raise ModelFetchError(
            f"{path} is not a drafter: config.json says architectures {found}, not [{ARCHITECTURE!r}]"
        )
    problem = _own_problem(config) or _fit_problem(config, _text_config(read_config(target)))
    if problem:
        raise ModelFetchError(f"drafter {path}: config.json: {problem}")
    weights.check_directory(path)


def _own_problem(config: dict[str, Any]) -> str | None:
    dflash = config.get("dflash_config")
    if not isinstance(dflash, dict):
        return "dflash_config is missing"
    if not _count(dflash.get("mask_token_id"), least=0):
        return "dflash_config.mask_token_id must be a token id"
    layers = dflash.get("target_layer_ids")
    if not isinstance(layers, list) or not layers or not all(_count(layer, least=0) for layer in layers):
        return "dflash_config.target_layer_ids must be a list of layer numbers"
    if not _count(config.get("block_size"), least=2):
        return "block_size must be an integer of at least 2"
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not _count(config.get(key), least=1):
            return f"{key} must be a positive integer"
    return None


def _fit_problem(config: dict[str, Any], target: dict[str, Any]) -> str | None:
    for key in ("hidden_size", "vocab_size"):
        if key in target and config[key] != target[key]:
            return f"{key} is {config[key]}, but the target's is {target[key]}"
    layers = target.get("num_hidden_layers")
    if layers is not None and config.get("num_target_layers", layers) != layers:
        return f"num_target_layers is {config['num_target_layers']}, but the target has {layers}"
    if layers is not None and max(config["dflash_config"]["target_layer_ids"]) >= layers:
        return f"dflash_config.target_layer_ids has layer {max(config['dflash_config']['target_layer_ids'])}, " + (
            f"but the target has {layers}"
        )
    if config["dflash_config"]["mask_token_id"] >= config["vocab_size"]:
        return "dflash_config.mask_token_id is outside the vocabulary"
    return None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    # Multimodal targets keep the language model's numbers one level down.
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _count(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
