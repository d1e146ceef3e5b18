"""Rotary position tables, from transformers' own initialisers, and their application.

What this module does not do: scalings whose frequencies depend on the current length (`dynamic`, `longrope`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from serve_app.errors import ConfigError

STATIC_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Rope:
    """cos and sin of every position of the context.

    Attributes:
        cos, sin: [positions, head_dim]. The first half of `sin` is negated, so that a roll by half a head replaces
            the usual concatenation of halves.

    Args:
        config: a transformers configuration with `rope_parameters`.
        positions: how many positions to tabulate; may exceed the model's own maximum by a tree.
    Raises:
        ConfigError: the scaling is none of `STATIC_TYPES`.
    """

    def __init__(self, config: Any, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind not in STATIC_TYPES:
            raise ConfigError(f"rope scaling {kind!r} is not supported by the embedded engine", param="model.source")
        embedding = LlamaRotaryEmbedding(config)
        cos, sin = embedding(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self.cos = cos[0].to(device, dtype)
        self.sin = signed.to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for `rotate_`: positions [...] → cos, sin [..., 1, head_dim]."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads in place: x [..., heads, head_dim], cos and sin as `Rope.at` returns them."""
    turned = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(turned, sin)
