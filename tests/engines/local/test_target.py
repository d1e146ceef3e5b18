"""The lean forward against transformers' own modelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.engines.local.attention import open_window
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.kv_cache import KVCache
from serve_app.engines.local.target import Target, read_config
from serve_app.errors import ConfigError
from tests.engines.local.conftest import LLAMA3_ROPE, VOCAB, write_model

CPU = torch.device("cpu")
CAPACITY = 96
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-untied-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
}  # fmt: skip


class Forward:
    """A target with a cache of three slots, computing causal pieces."""

    def __init__(self, path: Path, features: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> None:
        config = read_config(path)
        self.target = Target(Checkpoint(path, CPU, dtype, param="model.source"), config, CAPACITY, features)
        shape = self.target.shape
        self.cache = KVCache(3, CAPACITY, shape.layers, shape.kv_heads, shape.head_dim, CPU, dtype)

    def __call__(self, ids: Tensor, start: int, slot: int = 1) -> tuple[Tensor, Tensor]:
        width = ids.shape[1]
        places = torch.arange(start, start + width)[None]
        causal = torch.ones(1, width, width, dtype=torch.bool).tril()
        window = open_window(
            slice(slot, slot + 1),
            torch.tensor([start]),
            causal,
            start + width,
            self.target.shape.groups,
            self.target.dtype,
        )
        hidden, features = self.target.forward(ids, places, (slot * CAPACITY + places).flatten(), self.cache, window)
        return self.target.logits(hidden), features


@pytest.fixture(scope="module", params=list(VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = VARIANTS[request.param]
    return write_model(tmp_path_factory.mktemp("variant"), kind, seed=5, **changes)


@torch.inference_mode()
def test_logits_equal_transformers(model: Path) -> None:
    ids = torch.randint(0, VOCAB, (1, 70), generator=torch.Generator().manual_seed(1))
    expected = AutoModelForCausalLM.from_pretrained(model)(ids).logits
    forward = Forward(model)
    pieces = [forward(ids[:, a:b], a)[0] for a, b in ((0, 31), (31, 32), (32, 70))]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_features_are_the_layers_outputs_not_their_inputs(model: Path) -> None:
    ids = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(2))
    states = AutoModelForCausalLM.from_pretrained(model)(ids, output_hidden_states=True).hidden_states
    features = Forward(model, (0, 2))(ids, 0)[1]
    torch.testing.assert_close(features, torch.cat((states[1], states[3]), -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"num_hidden_layers": 5}, "model.layers.4"),
        ({"intermediate_size": 80}, "gate_proj and up_proj"),
        ({"num_key_value_heads": 4}, "qkv"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(tiny: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=said) as caught:
        Forward(tmp_path)
    assert caught.value.param == "model.source"
