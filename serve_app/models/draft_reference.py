"""A DFlash drafter in plain PyTorch over a finished text: marginals at any set of positions, no KV cache.

Reads SGLang's DFlashDraftModel format. It is what `eval.py` measures with and what faster implementations are
compared to (arXiv 2602.06036): context strictly before the anchor, the block [anchor's token, mask, …] sees itself
in both directions.

What this module does not do: serve. The embedded engine has its own forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from serve_app.errors import ModelFetchError


@dataclass
class DraftReference:
    """Weights of a drafter, and the target's embedding and head that it borrows.

    Attributes:
        weights: by checkpoint name. embedding, head: [vocab, hidden] of the target. config: the drafter's config.json.
    """

    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    config: dict[str, Any]

    @classmethod
    def load(cls, path: Path, embedding: Tensor, head: Tensor) -> DraftReference:
        """Read a drafter's directory, in the embedding's dtype and on its device.

        Raises:
            ModelFetchError: no checkpoint there, or one of another hidden size.
        """
        try:
            config = json.loads((path / "config.json").read_text())
        except OSError:
            raise ModelFetchError(f"no drafter in {path}: it has no config.json") from None
        if config["hidden_size"] != embedding.shape[1]:
            raise ModelFetchError(
                f"the drafter's hidden size is {config['hidden_size']}, the target's {embedding.shape[1]}"
            )
        weights: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= {k: v.to(embedding.device, embedding.dtype) for k, v in load_file(file).items()}
        return cls(weights, embedding, head, config)

    @property
    def block_size(self) -> int:
        """Root and masks together."""
        return int(self.config["block_size"])

    @property
    def feature_layers(self) -> list[int]:
        """Target layers whose outputs are the context features."""
        return list(self.config["dflash_config"]["target_layer_ids"])

    @torch.no_grad()
    def logits(self, features: Tensor, tokens: Tensor, anchors: Tensor, chunk: int = 32) -> Iterator[Tensor]:
        """Logits of depths 1 … b-1 for `chunk` anchors at a time: [≤chunk, b-1, vocab] in fp32.

        Args:
            features: [n, layers·hidden] of the text. tokens, anchors: int64 [n], [P]; every anchor is at least 1.
        """
        context = self._norm(F.linear(features, self.weights["fc.weight"]), "hidden_norm")
        layers = [self._context(i, context) for i in range(self.config["num_hidden_layers"])]
        for part in anchors.split(chunk):
            yield F.linear(self._block(layers, tokens, part), self.head).float()

    def _context(self, layer: int, context: Tensor) -> tuple[Tensor, Tensor]:
        size, name = self.config["head_dim"], f"layers.{layer}.self_attn."
        keys = F.linear(context, self.weights[name + "k_proj.weight"]).unflatten(-1, (-1, size))
        values = F.linear(context, self.weights[name + "v_proj.weight"]).unflatten(-1, (-1, size))
        at = torch.arange(len(context), device=context.device)
        return self._rotate(self._norm(keys, name + "k_norm"), at), values

    def _block(self, layers: list[tuple[Tensor, Tensor]], tokens: Tensor, anchors: Tensor) -> Tensor:
        """Final-normed hidden states [P, b-1, hidden] of the mask slots."""
        config, size, b = self.config, self.config["head_dim"], self.block_size
        ids = torch.full((len(anchors), b), config["dflash_config"]["mask_token_id"], device=anchors.device)
        ids[:, 0] = tokens[anchors]
        at = anchors[:, None] + torch.arange(b, device=anchors.device)
        before = torch.arange(len(tokens), device=anchors.device) < anchors[:, None]
        seen = torch.cat([before, torch.ones(len(anchors), b, dtype=torch.bool, device=anchors.device)], 1)
        x = F.embedding(ids, self.embedding)
        for i, (ctx_keys, ctx_values) in enumerate(layers):
            name = f"layers.{i}."
            h = self._norm(x, name + "input_layernorm")
            q, k, v = (
                F.linear(h, self.weights[f"{name}self_attn.{p}_proj.weight"]).unflatten(-1, (-1, size)) for p in "qkv"
            )
            q = self._rotate(self._norm(q, name + "self_attn.q_norm"), at)
            k = self._rotate(self._norm(k, name + "self_attn.k_norm"), at)
            k = torch.cat([ctx_keys.expand(len(anchors), -1, -1, -1), k], 1).transpose(1, 2)
            v = torch.cat([ctx_values.expand(len(anchors), -1, -1, -1), v], 1).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, attn_mask=seen[:, None, None], enable_gqa=True
            )
            x = x + F.linear(out.transpose(1, 2).flatten(2), self.weights[name + "self_attn.o_proj.weight"])
            h = self._norm(x, name + "post_attention_layernorm")
            gate, up = (F.linear(h, self.weights[f"{name}mlp.{p}_proj.weight"]) for p in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self.weights[name + "mlp.down_proj.weight"])
        return self._norm(x[:, 1:], "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name + ".weight"]
        return F.rms_norm(x, (x.shape[-1],), weight, float(self.config["rms_norm_eps"]))

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Rotary embedding in halves: x [..., T, heads, size], at [..., T]."""
        size = x.shape[-1]
        inv = float(self.config["rope_theta"]) ** (
            -torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        )
        angle = (at[..., None].float() * inv)[..., None, :]
        a, b = x.float().chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
