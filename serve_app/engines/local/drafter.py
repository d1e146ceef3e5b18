"""DFlash drafter (arXiv 2602.06036): one non-causal forward proposes a whole block of tokens.

Features of committed tokens become one context vector each, which every layer turns into K/V of its own; the
block [root, mask, …] attends to that context and to itself. Slot j ≥ 1 predicts the token at its own position. Context
ends strictly before the root, whose features do not exist yet. Embedding and head are the target's.

The checkpoint format is SGLang's DFlashDraftModel.

What this module does not do: build trees, own the target, or decide what is committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config

from serve_app.engines.local.attention import Window, attend
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.kv_cache import KVCache
from serve_app.engines.local.layers import Shape, load_layer
from serve_app.engines.local.linear import Linear
from serve_app.engines.local.norm import RMSNorm
from serve_app.engines.local.rope import Rope, rotate_
from serve_app.errors import ConfigError

PARAM = "model.drafter"


@dataclass(frozen=True)
class DrafterSpec:
    """What a drafter's configuration says.

    Attributes:
        block_size: root and masks together; it drafts block_size − 1 tokens.
        mask_token: id whose embedding fills the block. feature_layers: target layers it reads, in checkpoint order.
    """

    shape: Shape
    block_size: int
    mask_token: int
    feature_layers: tuple[int, ...]
    config: Any

    @classmethod
    def read(cls, raw: dict[str, Any]) -> DrafterSpec:
        """Raises ConfigError when it is not a DFlash drafter's configuration."""
        if raw.get("architectures") != ["DFlashDraftModel"]:
            raise ConfigError(f"not a DFlash drafter: architectures is {raw.get('architectures')}", param=PARAM)
        own = raw.get("dflash_config") or {}
        missing = [key for key in ("mask_token_id", "target_layer_ids") if key not in own]
        missing += [key for key in ("block_size", "hidden_size", "vocab_size") if key not in raw]
        if missing:
            raise ConfigError(f"the drafter's config.json lacks {', '.join(missing)}", param=PARAM)
        config = Qwen3Config(**{key: value for key, value in raw.items() if key != "architectures"})
        layers = tuple(own["target_layer_ids"])
        if list(layers) != sorted(set(layers)):
            raise ConfigError(f"target_layer_ids must ascend, got {list(layers)}", param=PARAM)
        return cls(Shape.of(config), raw["block_size"], own["mask_token_id"], layers, config)

    def check_target(self, target: Shape) -> None:
        """Raises ConfigError naming the size that disagrees with the target's."""
        for name in ("hidden", "vocab"):
            mine, theirs = getattr(self.shape, name), getattr(target, name)
            if mine != theirs:
                raise ConfigError(f"the drafter's {name} size is {mine}, the target's {theirs}", param=PARAM)
        if not 0 <= self.mask_token < target.vocab:
            raise ConfigError(f"mask_token_id {self.mask_token} is outside the vocabulary", param=PARAM)
        if self.block_size < 2:
            raise ConfigError("block_size must be at least 2", param=PARAM)
        if self.feature_layers and self.feature_layers[-1] >= target.layers:
            raise ConfigError(
                f"the drafter reads target layer {self.feature_layers[-1]}, the target has {target.layers}", param=PARAM
            )


class Drafter:
    """Weights and forward of a DFlash drafter.

    Args:
        checkpoint: the drafter's directory. positions: rows of the position table, context plus a block.
    """

    def __init__(self, checkpoint: Checkpoint, spec: DrafterSpec, positions: int) -> None:
        self.spec, self.shape = spec, spec.shape
        shape, hidden = spec.shape, spec.shape.hidden
        self._fc = Linear(checkpoint.need("fc.weight", (hidden, len(spec.feature_layers) * hidden)))
        self._hidden_norm = RMSNorm(checkpoint.need("hidden_norm.weight", (hidden,)), shape.eps)
        self._norm = RMSNorm(checkpoint.need("norm.weight", (hidden,)), shape.eps)
        self._layers = [load_layer(checkpoint, f"layers.{i}.", shape) for i in range(shape.layers)]
        width = (shape.kv_heads * shape.head_dim, hidden)
        weights, norms = [], []
        for i in range(shape.layers):
            for name in ("k_proj", "v_proj"):
                weights.append(checkpoint.need(f"layers.{i}.self_attn.{name}.weight", width))
            norms.append(checkpoint.need(f"layers.{i}.self_attn.k_norm.weight", (shape.head_dim,)))
        # Every layer projects the same context vector, so all their K/V are one product.
        self._context_kv = Linear(torch.cat(weights))
        self._k_norms = torch.stack(norms)[:, None]
        self._rope = Rope(spec.config, positions, norms[0].device, norms[0].dtype)

    def append_context(self, features: Tensor, positions: Tensor, locations: Tensor, cache: KVCache) -> None:
        """Store the context of committed tokens.

        Args:
            features: [M, n·hidden], from `Target.forward`. positions, locations: int64 [M].
        """
        shape = self.shape
        context = self._hidden_norm(self._fc(features))
        kv = self._context_kv(context).view(-1, shape.layers, 2, shape.kv_heads, shape.head_dim)
        keys = F.rms_norm(kv[:, :, 0], (shape.head_dim,), None, shape.eps).mul_(self._k_norms)
        cos, sin = self._rope.at(positions)
        kv[:, :, 0] = rotate_(keys, cos[:, None], sin[:, None])
        cache.write_all(locations, kv.flatten(2).transpose(0, 1))

    def forward(self, embedded: Tensor, positions: Tensor, locations: Tensor, cache: KVCache, window: Window) -> Tensor:
        """Hidden states of the block's mask slots.

        Args:
            embedded: [B, b, hidden], the target's embedding of [root, mask, …]. positions: int64 [B, b].
            locations: int64 [B·b], cache rows behind the context; overwritten by the next context.
        Returns:
            [B, b − 1, hidden], final-normed: the target's head turns them into the logits of depths 1 … b − 1.
        """
        x = embedded
        cos, sin = self._rope.at(positions)
        for index, layer in enumerate(self._layers):
            query, kv = layer.project(x, cos, sin)
            cache.write(index, locations, kv)
            x = layer.finish(x, attend(query, cache.keys(index), cache.values(index), window))
        return self._norm(x[:, 1:])
