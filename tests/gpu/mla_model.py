"""A small latent-attention target (DeepSeek-V3's shape, as Kimi K2.6 has) with random weights, and a random drafter.

All layers are dense: a routing decision at a near-tie changes the logits by more than any rounding, which would hide a
fault of the tree behind the excuse. The vocabulary is tiny so that a random drafter is right often enough for paths to
be accepted and compacted.

What this module does not do: make text.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, LAYERS, HEADS, VOCAB, BLOCK = 512, 4, 8, 64, 8
Q_RANK, KV_RANK, NOPE, ROPE, VALUE, INNER = 128, 512, 128, 64, 128, 1024


def write_mla(folder: Path) -> tuple[Path, Path]:
    """Write both checkpoints below `folder`: (target, drafter)."""
    target, drafter = folder / "target", folder / "drafter"
    for path, config, weights in (
        (target, _target_config(), _target_weights()),
        (drafter, _drafter_config(), _drafter_weights()),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        save_file({name: w.to(torch.bfloat16) for name, w in weights.items()}, path / "model.safetensors")
    return target, drafter


def _target_config() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": 128,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": KV_RANK,
        "q_lora_rank": Q_RANK, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "qk_nope_head_dim": NOPE,
        "topk_method": "noaux_tc", "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_layer_freq": 1,
        "first_k_dense_replace": LAYERS, "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": VOCAB - 1,
    }  # fmt: skip


def _drafter_config() -> dict[str, object]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": False,
        "block_size": BLOCK, "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2]},
    }  # fmt: skip


class _Random:
    """Weights of a seed; matrices keep the scale of what they multiply."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) / columns**0.5


def _target_weights() -> dict[str, Tensor]:
    random = _Random(1)
    weights = {
        "model.embed_tokens.weight": random.matrix(VOCAB, HIDDEN) * HIDDEN**0.5,
        "lm_head.weight": 4 * random.matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_a_proj", Q_RANK, HIDDEN),
            ("self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK),
            ("self_attn.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN),
            ("self_attn.kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK),
            ("self_attn.o_proj", HIDDEN, HEADS * VALUE),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            weights[f"{start}{name}.weight"] = random.matrix(rows, columns)
        for name, size in (
            ("self_attn.q_a_layernorm", Q_RANK),
            ("self_attn.kv_a_layernorm", KV_RANK),
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
        ):
            weights[f"{start}{name}.weight"] = torch.ones(size)
    return weights


def _drafter_weights() -> dict[str, Tensor]:
    random = _Random(2)
    weights = {
        "fc.weight": random.matrix(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for name, rows, columns in (
        ("self_attn.q_proj", 256, HIDDEN),
        ("self_attn.k_proj", 256, HIDDEN),
        ("self_attn.v_proj", 256, HIDDEN),
        ("self_attn.o_proj", HIDDEN, 256),
        ("mlp.gate_proj", INNER, HIDDEN),
        ("mlp.up_proj", INNER, HIDDEN),
        ("mlp.down_proj", HIDDEN, INNER),
    ):
        weights[f"layers.0.{name}.weight"] = random.matrix(rows, columns)
    for name, size in (
        ("self_attn.q_norm", 64),
        ("self_attn.k_norm", 64),
        ("input_layernorm", HIDDEN),
        ("post_attention_layernorm", HIDDEN),
    ):
        weights[f"layers.0.{name}.weight"] = torch.ones(size)
    return weights
