"""The drafter against a plain forward written from the paper, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from serve_app.engines.local.attention import open_window
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.drafter import Drafter, DrafterSpec
from serve_app.engines.local.kv_cache import KVCache
from serve_app.engines.local.layers import Shape
from serve_app.engines.local.target import read_config
from serve_app.errors import ConfigError
from tests.engines.local.conftest import write_drafter

CPU = torch.device("cpu")
CAPACITY, HEADS, KV, DIM, EPS, BLOCK = 64, 4, 2, 16, 1e-6, 6


def load(path: Path) -> Drafter:
    checkpoint = Checkpoint(path, CPU, torch.float32, param="model.drafter")
    return Drafter(checkpoint, DrafterSpec.read(checkpoint.config), CAPACITY)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """x [M, heads, DIM]."""
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.cat((positions[:, None] * frequencies,) * 2, -1)[:, None]
    turned = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    return x * angles.cos() + turned * angles.sin()


def reference(weights: dict[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """One request, no cache: features [C, 2·H] of positions 0 … C − 1, block [b, H] at C … C + b − 1."""
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    size, x = len(features), block
    for layer in range(2):
        w = {k.removeprefix(f"layers.{layer}."): v for k, v in weights.items() if k.startswith(f"layers.{layer}.")}
        normed = rms(x, w["input_layernorm.weight"])
        rows = torch.cat((context, normed))
        q = rms((normed @ w["self_attn.q_proj.weight"].T).view(-1, HEADS, DIM), w["self_attn.q_norm.weight"])
        k = rms((rows @ w["self_attn.k_proj.weight"].T).view(-1, KV, DIM), w["self_attn.k_norm.weight"])
        v = (rows @ w["self_attn.v_proj.weight"].T).view(-1, KV, DIM)
        q, k = rope(q, torch.arange(size, size + len(block))), rope(k, torch.arange(len(rows)))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w["self_attn.o_proj.weight"].T
        normed = rms(x, w["post_attention_layernorm.weight"])
        gate, up = (normed @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms(x, weights["norm.weight"])[1:]


@torch.inference_mode()
def test_equals_a_plain_forward_over_context_appended_in_pieces(tiny_drafter: Path) -> None:
    drafter, slot = load(tiny_drafter), 1
    cache = KVCache(2, CAPACITY, 2, KV, DIM, CPU, torch.float32)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(20, 128, generator=generator)
    block = torch.randn(BLOCK, 64, generator=generator)
    for start, end in ((0, 13), (13, 16), (16, 20)):
        places = torch.arange(start, end)
        drafter.append_context(features[start:end], places, slot * CAPACITY + places, cache)
        # A draft in between leaves block K/V behind the context, which the next context overwrites.
        got = draft(drafter, block, end, slot, cache)
    torch.testing.assert_close(got, reference(load_file(tiny_drafter / "model.safetensors"), features, block))


def draft(drafter: Drafter, block: Tensor, start: int, slot: int, cache: KVCache) -> Tensor:
    places = torch.arange(start, start + BLOCK)[None]
    everything = torch.ones(1, BLOCK, BLOCK, dtype=torch.bool)
    window = open_window(slice(slot, slot + 1), torch.tensor([start]), everything, CAPACITY, HEADS // KV, torch.float32)
    return drafter.forward(block[None], places, (slot * CAPACITY + places).flatten(), cache, window)[0]


def target_shape(tiny: Path) -> Shape:
    return Shape.of(read_config(tiny))


def test_a_fitting_drafter_is_accepted(tiny: Path, tiny_drafter: Path) -> None:
    load(tiny_drafter).spec.check_target(target_shape(tiny))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [2, 0]}}, "ascend"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 4]}}, "layer 4"),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 2]}}, "999"),
        ({"vocab_size": 400}, "vocab"),
        ({"block_size": 1}, "block_size"),
        ({"hidden_size": 128}, "hidden|shape"),
        ({"num_hidden_layers": 3}, "layers.2"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(tiny: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(write_drafter(tmp_path, **changes)).spec.check_target(target_shape(tiny))
    assert caught.value.param == "model.drafter"


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.1.self_attn.k_norm.weight",
        "layers.0.mlp.up_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load(write_drafter(tmp_path, drop=name))
