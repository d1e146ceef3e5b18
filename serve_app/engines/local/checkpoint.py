"""Reads a directory with config.json and safetensors into tensors by name, with errors that name what is wrong.

What this module does not do: fetch or convert models (`serve_app.models`), or know what a tensor is for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve_app.errors import ConfigError


class Checkpoint:
    """Tensors of one model directory, read lazily and cast on the way.

    Args:
        param: the configuration key that named the directory, for errors.
    Raises:
        ConfigError: no configuration or no weights there, or they are unreadable.
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, *, param: str) -> None:
        self.path, self.param = path, param
        self._device, self._dtype = device, dtype
        self.config: dict[str, Any] = self._json("config.json")
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no safetensors files in {path}", param=param)
        self._where: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    self._where.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {file}: {error}", param=param) from None

    def get(self, name: str) -> Tensor | None:
        """The tensor on its device in the checkpoint's dtype, or None."""
        file = self._where.get(name)
        if file is None:
            return None
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor.to(self._device, self._dtype)

    def need(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Raises ConfigError naming the tensor when it is missing or has another shape."""
        tensor = self.get(name)
        if tensor is None:
            raise ConfigError(f"{self.path} has no tensor {name}", param=self.param)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ConfigError(
                f"tensor {name} of {self.path} has shape {tuple(tensor.shape)}, expected {shape}", param=self.param
            )
        return tensor

    def _json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.path / name}: {error}", param=self.param) from None
        if not isinstance(data, dict):
            raise ConfigError(f"{self.path / name} must hold an object", param=self.param)
        return data
