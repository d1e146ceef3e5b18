"""Tiny random models that load in milliseconds, and engines over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from serve_app.config import Config, load_config
from serve_app.engines.local.vocabulary import _byte_of_char

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('roles must be known') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_tokenizer(path: Path) -> None:
    """Byte-level, no merges: ids 0–2 are special, then one token per byte."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    chars = sorted(_byte_of_char(), key=_byte_of_char().__getitem__)
    vocab = {token: n for n, token in enumerate([*specials, *chars])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(path)


def write_model(path: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A random model of a transformers class, saved in float32."""
    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    make_config, make_model = classes[kind]
    torch.manual_seed(seed)
    model = make_model(make_config(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_drafter(path: Path, seed: int = 1, drop: str | None = None, **changes: Any) -> Path:
    """A random DFlash drafter of block 6 that reads target layers 0 and 2."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{key: value for key, value in SIZES.items() if key != "initializer_range"},
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 6,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 2]},
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)
    hidden, kv, mlp = 64, 32, 96
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    shape: tuple[int, ...]
    shapes.update({"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)})
    for layer in range(2):
        attention = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
        for name, shape in attention.items():
            shapes[f"layers.{layer}.self_attn.{name}_proj.weight"] = shape
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{layer}.self_attn.{name}.weight"] = (16,)
        for name, shape in {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}.items():
            shapes[f"layers.{layer}.mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (hidden,)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * 0.2
        tensors[name] = tensor + 1 if "norm" in name else tensor
    tensors.pop(drop or "", None)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with tied embeddings."""
    return write_model(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="session")
def make_config(tiny: Path, tiny_drafter: Path) -> Callable[..., Config]:
    """Configuration of a tiny engine; keyword arguments are sections merged over the defaults."""

    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, Any] = {
            "model": {"source": str(tiny), "drafter": str(tiny_drafter), "dtype": "float32", "device": "cpu"},
            "engine": {"threads": 1, "max_running": 4, "max_queued": 8, "prefill_chunk": 32},
            "speculation": {"budget": 12},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        return load_config(tree, use_env=False)

    return make
