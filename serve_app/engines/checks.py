"""What an engine would refuse on this machine, as far as that can be told in a moment and without loading anything.

What this module does not do: fetch, or import an engine.
"""

from __future__ import annotations

from serve_app.config import Config
from serve_app.errors import ConfigError, ModelFetchError
from serve_app.models.sources import check_source
from serve_app.sglang_plugin.plugin import PluginError, check_version


def check_machine(config: Config) -> None:
    """Raises ConfigError for an engine, a device or a source of the model that this machine does not have."""
    if config.engine.kind == "sglang":
        check_sglang()
    check_device(config)
    try:
        check_source(config.model.source)
    except ModelFetchError as error:
        raise ConfigError(f"model.source: {error.message}", param="model.source") from None


def check_sglang() -> None:
    """Raises ConfigError unless the supported SGLang is installed."""
    try:
        check_version()  # the engine stands on internals as the plugin does
    except PluginError as error:
        # Its pins replace this environment's torch.
        hint = "install the extra [sglang] in an environment of its own, pip install 'ddtree-serve[sglang]'"
        raise ConfigError(f"engine.kind sglang: {error}; {hint}", param="engine.kind") from error


def check_device(config: Config) -> None:
    """Raises ConfigError where CUDA is asked for and torch sees none."""
    if config.model.device != "cuda":
        return
    import torch  # a second, which others need not wait for

    if not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, but torch sees no CUDA device", param="model.device")
