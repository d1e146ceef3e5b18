"""One decoder layer of the Llama family, shared by the target and the drafter: weights and arithmetic.

Query, key and value projections are one matrix, gate and up another, and the residual stream keeps the model's dtype,
as in the reference modelling. What differs per model (q/k norms, biases) is data, not subclasses.

What this module does not do: attend, cache, or read files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.linear import Linear
from serve_app.engines.local.norm import RMSNorm
from serve_app.engines.local.rope import rotate_
from serve_app.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the Llama family, as its configuration states them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers configuration."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
        )

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class DecoderLayer:
    """Weights of one layer.

    Args:
        take: returns the tensor of a name relative to the layer ("self_attn.q_proj.weight"), or None when the
            checkpoint has no such optional tensor.
    """

    def __init__(self, shape: Shape, take: Callable[[str], Tensor | None]) -> None:
        self.shape = shape
        self.input_norm = RMSNorm(_needed(take, "input_layernorm.weight"), shape.eps)
        self.post_norm = RMSNorm(_needed(take, "post_attention_layernorm.weight"), shape.eps)
        self.qkv = _joined(take, [f"self_attn.{name}_proj" for name in "qkv"])
        self.o = _joined(take, ["self_attn.o_proj"])
        self.gate_up = _joined(take, ["mlp.gate_proj", "mlp.up_proj"])
        self.down = _joined(take, ["mlp.down_proj"])
        q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        # One table [heads + kv_heads, head_dim]: q and k are normalised in one call.
        self.qk_norm = None
        if (q_norm is None) != (k_norm is None):
            raise KeyError("self_attn.q_norm.weight" if q_norm is None else "self_attn.k_norm.weight")
        if q_norm is not None and k_norm is not None:
            self.qk_norm = torch.cat((q_norm.expand(shape.heads, -1), k_norm.expand(shape.kv_heads, -1)))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Residual [B, W, hidden] → rotated queries [B, W, H, D] and rotated K beside V, [B·W, 2·KVH·D]."""
        shape = self.shape
        qkv = self.qkv(self.input_norm(x))
        batch, width, size = qkv.shape
        heads = qkv.view(batch, width, -1, shape.head_dim)
        qk = heads[:, :, : shape.heads + shape.kv_heads]
        if self.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (shape.head_dim,), None, shape.eps).mul_(self.qk_norm))
        rotate_(qk, cos, sin)
        return heads[:, :, : shape.heads], qkv.view(-1, size)[:, shape.heads * shape.head_dim :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output [B, W, H·D] and the MLP to the residual [B, W, hidden]."""
        x = self.o.plus(attended, x)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return self.down.plus(F.silu(gate).mul_(up), x)


def load_layer(checkpoint: Checkpoint, prefix: str, shape: Shape) -> DecoderLayer:
    """One layer of a checkpoint, `prefix` like "model.layers.3.".

    Raises:
        ConfigError: a tensor is missing, or does not have the size that the configuration states.
    """
    try:
        layer = DecoderLayer(shape, lambda name: checkpoint.get(prefix + name))
    except KeyError as error:
        raise ConfigError(f"{checkpoint.path} has no tensor {prefix}{error.args[0]}", param=checkpoint.param) from None
    except RuntimeError as error:
        raise ConfigError(
            f"{checkpoint.path}: {prefix[:-1]} cannot be built: {error}", param=checkpoint.param
        ) from None
    attended = shape.heads * shape.head_dim
    expected = {
        "qkv": (layer.qkv, shape.hidden, attended + 2 * shape.kv_heads * shape.head_dim),
        "o_proj": (layer.o, attended, shape.hidden),
        "gate_proj and up_proj": (layer.gate_up, shape.hidden, 2 * shape.intermediate),
        "down_proj": (layer.down, shape.intermediate, shape.hidden),
    }
    for name, (linear, inputs, outputs) in expected.items():
        if (linear.in_features, linear.out_features) != (inputs, outputs):
            got = (linear.in_features, linear.out_features)
            raise ConfigError(
                f"{checkpoint.path}: {prefix}{name} maps {got[0]} to {got[1]}; "
                f"the configuration says {inputs} to {outputs}",
                param=checkpoint.param,
            )
    return layer


def _needed(take: Callable[[str], Tensor | None], name: str) -> Tensor:
    tensor = take(name)
    if tensor is None:
        raise KeyError(name)
    return tensor


def _joined(take: Callable[[str], Tensor | None], names: list[str]) -> Linear:
    weight = torch.cat([_needed(take, f"{name}.weight") for name in names])
    biases = [take(f"{name}.bias") for name in names]
    present = [bias for bias in biases if bias is not None]
    if present and len(present) != len(names):
        raise KeyError(f"{names[0]}.bias")
    return Linear(weight, torch.cat(present) if present else None)
