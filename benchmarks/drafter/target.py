"""The target's weights for training: from a GGUF file or a model directory, in bf16, projections fused.

Llama and Qwen3 shapes only: RMS norm, SwiGLU, rotary halves, grouped heads, no biases, optionally a norm per head. Not
a serving loader: it keeps whole tensors in memory, ignores RoPE scaling and knows nothing of tokenizers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a Llama-shaped model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    rope_theta: float
    eps: float


@dataclass
class Target:
    """embed and head [V, H] (the same tensor when tied), norm [H]; per layer qkv [(HQ+2HK)·D, H], o, gate_up [2I, H],
    down, norm1, norm2, and q_norm, k_norm [D] where the model has them."""

    shape: TargetShape
    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: list[dict[str, Tensor]]

    def to(self, device: torch.device, dtype: torch.dtype) -> Target:
        """A copy on `device` in `dtype`."""
        move = lambda t: t.to(device, dtype)  # noqa: E731
        embed = move(self.embed)
        head = embed if self.head is self.embed else move(self.head)
        layers = [{k: move(v) for k, v in layer.items()} for layer in self.layers]
        return Target(self.shape, embed, head, move(self.norm), layers)


def rope_tables(shape: TargetShape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] in fp32."""
    inv = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inv
    return angle.cos().float().to(device), angle.sin().float().to(device)


def read_gguf(path: Path) -> Target:
    """Dequantise a Llama GGUF to bf16. llama.cpp interleaves the rotary halves of q and k; they come back in
    Llama's order."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    meta = {k: f.contents() for k, f in reader.fields.items() if k.startswith("llama.")}
    raw = {
        t.name: torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), dtype=np.float32)) for t in reader.tensors
    }
    heads, kv = int(meta["llama.attention.head_count"]), int(meta["llama.attention.head_count_kv"])
    hidden = int(meta["llama.embedding_length"])
    shape = TargetShape(
        int(meta["llama.block_count"]),
        hidden,
        heads,
        kv,
        hidden // heads,
        int(meta["llama.feed_forward_length"]),
        raw["token_embd.weight"].shape[0],
        float(meta["llama.rope.freq_base"]),
        float(meta["llama.attention.layer_norm_rms_epsilon"]),
    )

    def halves(w: Tensor, n: int) -> Tensor:
        return w.view(n, w.shape[0] // n // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    layers = []
    for i in range(shape.layers):
        g = lambda name, i=i: raw[f"blk.{i}.{name}.weight"]  # noqa: E731
        layers.append(
            {
                "qkv": torch.cat([halves(g("attn_q"), heads), halves(g("attn_k"), kv), g("attn_v")]),
                "o": g("attn_output"),
                "gate_up": torch.cat([g("ffn_gate"), g("ffn_up")]),
                "down": g("ffn_down"),
                "norm1": g("attn_norm"),
                "norm2": g("ffn_norm"),
            }
        )
    embed = raw["token_embd.weight"]
    head = raw.get("output.weight", embed)
    return Target(shape, embed, head, raw["output_norm.weight"], layers).to(torch.device("cpu"), torch.bfloat16)


def read_directory(path: Path) -> Target:
    """A Llama or Qwen3 checkpoint in transformers' format, as `python -m serve_app.models fetch` prints the path of."""
    config = json.loads((path / "config.json").read_text())
    raw: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        raw |= load_file(file)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    sizes = (
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or hidden // heads,
        config["intermediate_size"],
    )
    vocab = raw["model.embed_tokens.weight"].shape[0]
    shape = TargetShape(config["num_hidden_layers"], hidden, *sizes, vocab, float(theta), float(config["rms_norm_eps"]))
    layers = []
    for i in range(shape.layers):
        g = lambda name, i=i: raw[f"model.layers.{i}.{name}.weight"]  # noqa: E731
        layer = {
            "qkv": torch.cat([g(f"self_attn.{p}_proj") for p in "qkv"]),
            "o": g("self_attn.o_proj"),
            "gate_up": torch.cat([g("mlp.gate_proj"), g("mlp.up_proj")]),
            "down": g("mlp.down_proj"),
            "norm1": g("input_layernorm"),
            "norm2": g("post_attention_layernorm"),
        }
        if f"model.layers.{i}.self_attn.q_norm.weight" in raw:
            layer |= {"q_norm": g("self_attn.q_norm"), "k_norm": g("self_attn.k_norm")}
        layers.append(layer)
    embed = raw["model.embed_tokens.weight"]
    head = raw.get("lm_head.weight", embed)
    return Target(shape, embed, head, raw["model.norm.weight"], layers).to(torch.device("cpu"), torch.bfloat16)


def tiny_target(seed: int = 0, vocab: int = 160) -> Target:
    """A random two-layer-per-feature model for rehearsals and tests; large enough weights that its greedy text
    is not constant."""
    gen = torch.Generator().manual_seed(seed)
    shape = TargetShape(
        layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, inter=48, vocab=vocab, rope_theta=10000.0, eps=1e-5
    )
    draw = lambda *s: torch.randn(*s, generator=gen) * (1.5 / s[-1] ** 0.5)  # noqa: E731
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = [
        {
            "qkv": draw(qkv, 32),
            "o": draw(32, shape.heads * 16),
            "gate_up": draw(96, 32),
            "down": draw(32, 48),
            "norm1": torch.ones(32),
            "norm2": torch.ones(32),
        }
        for _ in range(shape.layers)
    ]
    embed = draw(vocab, 32) * 4
    return Target(shape, embed, embed, torch.ones(32), layers)
