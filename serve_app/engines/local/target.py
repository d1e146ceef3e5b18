"""The target: any Llama- or Qwen3-style causal language model, as a lean forward over slot caches.

transformers' modelling is the reference and the tests compare logits with it; the request path does not use it, because
here projections are fused and packed, and attention reads a static cache in place.

What this module does not do: schedule, sample, or own a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from serve_app.engines.local.attention import Window, attend
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.kv_cache import KVCache
from serve_app.engines.local.layers import Shape, load_layer
from serve_app.engines.local.linear import Linear
from serve_app.engines.local.norm import RMSNorm
from serve_app.engines.local.rope import Rope
from serve_app.errors import ConfigError

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
PARAM = "model.source"


def read_config(path: Path) -> Any:
    """The model's transformers configuration, once it is one that this engine computes exactly.

    Raises:
        ConfigError: another architecture, or a variant (sliding window, other activation, quantised weights) not
            computed here.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the model configuration in {path}: {error}", param=PARAM) from None
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"model type {config.model_type!r} is not supported by the embedded engine (supported: {known})",
            param=PARAM,
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"the weights in {path} are quantised; the embedded engine reads plain ones", param=PARAM)
    if config.hidden_act != "silu":
        raise ConfigError(f"activation {config.hidden_act!r} is not supported by the embedded engine", param=PARAM)
    sliding = getattr(config, "use_sliding_window", config.model_type == "mistral")
    if sliding and getattr(config, "sliding_window", None):
        raise ConfigError("sliding-window attention is not supported by the embedded engine", param=PARAM)
    return config


class Target:
    """Weights and forward of the target.

    Attributes:
        shape: sizes. embedding: [vocab, hidden]; the drafter shares it and `logits`.

    Args:
        checkpoint: the model's directory. config: what `read_config` returned.
        positions: rows of the position table, context plus a tree.
        feature_layers: layers whose outputs a drafter reads, ascending.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, positions: int, feature_layers: Sequence[int] = ()) -> None:
        self.shape = shape = Shape.of(config)
        self.embedding = checkpoint.need("model.embed_tokens.weight", (shape.vocab, shape.hidden))
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._layers = [load_layer(checkpoint, f"model.layers.{i}.", shape) for i in range(shape.layers)]
        self._norm = RMSNorm(checkpoint.need("model.norm.weight", (shape.hidden,)), shape.eps)
        tied = config.tie_word_embeddings
        self._head = Linear(self.embedding if tied else checkpoint.need("lm_head.weight", (shape.vocab, shape.hidden)))
        self._rope = Rope(config, positions, self.device, self.dtype)
        wrong = [layer for layer in feature_layers if not 0 <= layer < shape.layers]
        if wrong:
            raise ConfigError(
                f"the drafter reads target layers {wrong}, the target has {shape.layers}", param="model.drafter"
            )
        self.feature_layers = tuple(feature_layers)

    def forward(
        self, input_ids: Tensor, positions: Tensor, locations: Tensor, cache: KVCache, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Compute new rows, writing their K/V into the cache.

        Args:
            input_ids, positions: int64 [B, W]. locations: int64 [B·W], flat cache rows to write.
        Returns:
            Final-norm hidden states [B, W, hidden], and features [B, W, n·hidden]: the outputs of `feature_layers`
            (transformers' `hidden_states[layer + 1]`) side by side, n = 0 without a drafter.
        """
        x = F.embedding(input_ids, self.embedding)
        cos, sin = self._rope.at(positions)
        features = []
        for index, layer in enumerate(self._layers):
            query, kv = layer.project(x, cos, sin)
            cache.write(index, locations, kv)
            x = layer.finish(x, attend(query, cache.keys(index), cache.values(index), window))
            if index in self.feature_layers:
                features.append(x)
        joined = torch.cat(features, -1) if features else x.new_empty((*x.shape[:2], 0))
        return self._norm(x), joined

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] → [..., vocab] in the model's dtype."""
        return self._head(hidden)
