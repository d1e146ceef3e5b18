"""A DFlash drafter as a training forward: master weights in fp32, bf16 copies for the matrix products, SGLang's
checkpoint format.

Forward only over (row, anchor) blocks whose context features are given; inference with a KV cache lives in the
engines. The target's embedding is both input table and head and is never trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.drafter.target import TargetShape

_SPLIT = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
}


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter. `target` gives hidden size, heads, MLP and vocabulary; layer_ids the target layers it
    reads."""

    target: TargetShape
    layers: int
    block: int
    mask_id: int
    layer_ids: tuple[int, ...]

    def config(self) -> dict[str, object]:
        """config.json as SGLang's DFlashDraftModel reads it."""
        t = self.target
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": t.hidden,
            "intermediate_size": t.inter,
            "num_attention_heads": t.heads,
            "num_key_value_heads": t.kv_heads,
            "head_dim": t.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": t.vocab,
            "rms_norm_eps": t.eps,
            "rope_theta": t.rope_theta,
            "max_position_embeddings": 8192,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "block_size": self.block,
            "num_target_layers": t.layers,
            "dflash_config": {"mask_token_id": self.mask_id, "target_layer_ids": list(self.layer_ids)},
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def initial(shape: DrafterShape, seed: int = 0) -> dict[str, Tensor]:
    """Random master weights (fp32): matrices N(0, 1/√fan_in), output projections scaled down by depth, norms 1."""
    t, gen = shape.target, torch.Generator().manual_seed(seed)
    draw = lambda rows, cols, scale=1.0: torch.randn(rows, cols, generator=gen) * (scale / cols**0.5)  # noqa: E731
    deep = (2 * shape.layers) ** -0.5
    w = {
        "fc": draw(t.hidden, len(shape.layer_ids) * t.hidden),
        "hidden_norm": torch.ones(t.hidden),
        "norm": torch.ones(t.hidden),
    }
    for i in range(shape.layers):
        w |= {
            f"{i}.qkv": draw((t.heads + 2 * t.kv_heads) * t.head_dim, t.hidden),
            f"{i}.o": draw(t.hidden, t.heads * t.head_dim, deep),
            f"{i}.gate_up": draw(2 * t.inter, t.hidden),
            f"{i}.down": draw(t.hidden, t.inter, deep),
            f"{i}.norm1": torch.ones(t.hidden),
            f"{i}.norm2": torch.ones(t.hidden),
            f"{i}.q_norm": torch.ones(t.head_dim),
            f"{i}.k_norm": torch.ones(t.head_dim),
        }
    return w


def save_checkpoint(
    weights: dict[str, Tensor], shape: DrafterShape, feature_scale: Tensor, folder: Path, shard_bytes: int = 14_500_000
) -> None:
    """bf16 shards, index and config. `feature_scale` [n·H], by which training multiplies the features, is folded
    into fc."""
    folder.mkdir(parents=True, exist_ok=True)
    t, flat = shape.target, {}
    w = {k: v.detach().float().cpu() for k, v in weights.items()}
    flat["fc.weight"] = w["fc"] * feature_scale.float().cpu()
    flat["hidden_norm.weight"], flat["norm.weight"] = w["hidden_norm"], w["norm"]
    sizes = {
        "qkv": [t.heads * t.head_dim, t.kv_heads * t.head_dim, t.kv_heads * t.head_dim],
        "gate_up": [t.inter, t.inter],
    }
    for i in range(shape.layers):
        for name, parts in _SPLIT.items():
            value = w[f"{i}.{name}"]
            for part, piece in zip(parts, value.split(sizes.get(name, [value.shape[0]])), strict=True):
                flat[f"layers.{i}.{part}.weight"] = piece
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for key, value in flat.items():
        if used + value.numel() * 2 > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][key] = value.bfloat16().contiguous()
        used += value.numel() * 2
    where = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where}, indent=1) + "\n"
    )
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")


def load_checkpoint(folder: Path, target: TargetShape) -> tuple[DrafterShape, dict[str, Tensor]]:
    """(shape, fp32 weights with feature scale 1) of a folder in SGLang's format."""
    config = json.loads((folder / "config.json").read_text())
    shape = DrafterShape(
        target,
        config["num_hidden_layers"],
        config["block_size"],
        config["dflash_config"]["mask_token_id"],
        tuple(config["dflash_config"]["target_layer_ids"]),
    )
    flat: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as f:
            flat |= {k: f.get_tensor(k).float() for k in f.keys()}  # noqa: SIM118
    w = {"fc": flat["fc.weight"], "hidden_norm": flat["hidden_norm.weight"], "norm": flat["norm.weight"]}
    for i in range(shape.layers):
        for name, parts in _SPLIT.items():
            w[f"{i}.{name}"] = torch.cat([flat[f"layers.{i}.{p}.weight"] for p in parts])
    return shape, w


@dataclass
class Blocks:
    """Draft blocks over B rows of L tokens, A anchors each. anchor, start, blen [B·A] int32; root [B·A] the
    anchor's token."""

    anchor: Tensor
    start: Tensor
    blen: Tensor
    root: Tensor


def forward(
    w: dict[str, Tensor],
    shape: DrafterShape,
    embed: Tensor,
    features: Tensor,
    blocks: Blocks,
    cos: Tensor,
    sin: Tensor,
    ops: ModuleType,
) -> Tensor:
    """Hidden states [B·A·S, H] after the last norm. features [B, L, n·H] already scaled; slot 0 of each block is
    the root token."""
    t, s = shape.target, shape.block
    b, length, width = features.shape
    ba, q_width, kv_width = blocks.anchor.numel(), t.heads * t.head_dim, t.kv_heads * t.head_dim
    ctx = ops.add_norm(F.linear(features.view(b * length, width), w["fc"]), None, w["hidden_norm"], t.eps)[1]
    ctx_pos = torch.arange(length, device=features.device).repeat(b)
    pos = (blocks.anchor.long()[:, None] + torch.arange(s, device=features.device)).view(-1)
    ids = torch.full((ba, s), shape.mask_id, device=features.device, dtype=torch.int64)
    ids[:, 0] = blocks.root
    x, y = F.embedding(ids.view(-1), embed), None
    dims = (s, length, t.heads, t.kv_heads, t.head_dim)
    for i in range(shape.layers):
        x, n = ops.add_norm(x, y, w[f"{i}.norm1"], t.eps)
        qkv = F.linear(n, w[f"{i}.qkv"])
        kv_ctx = F.linear(ctx, w[f"{i}.qkv"][q_width:])
        q = ops.head_norm_rope(qkv[:, :q_width], w[f"{i}.q_norm"], cos, sin, pos, t.heads, t.eps)
        kb = ops.head_norm_rope(
            qkv[:, q_width : q_width + kv_width], w[f"{i}.k_norm"], cos, sin, pos, t.kv_heads, t.eps
        )
        kc = ops.head_norm_rope(kv_ctx[:, :kv_width], w[f"{i}.k_norm"], cos, sin, ctx_pos, t.kv_heads, t.eps)
        att = ops.block_attention(
            q,
            kc,
            kv_ctx[:, kv_width:],
            kb,
            qkv[:, q_width + kv_width :],
            blocks.anchor,
            blocks.start,
            blocks.blen,
            dims,
        )
        x, n = ops.add_norm(x, F.linear(att, w[f"{i}.o"]), w[f"{i}.norm2"], t.eps)
        y = F.linear(ops.swiglu(F.linear(n, w[f"{i}.gate_up"])), w[f"{i}.down"])
    return ops.add_norm(x, y, w["norm"], t.eps)[1]
