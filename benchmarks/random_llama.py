"""Configurations of a dense GQA model and its DFlash drafter that shard over eight ranks, for weights made up at load.

SGLang fills them with `load_format: dummy`: nothing is on disk, the text means nothing, and a step takes the time that
a trained model of this shape takes.

What this module does not do: run anything.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
SHARED: dict[str, Any] = {
    "torch_dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "attention_bias": False, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LAYERS = 32
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS, "mlp_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5, "tie_word_embeddings": False,
    "block_size": 16, "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 8, 15, 22, 29]},
}  # fmt: skip


def parameters() -> int:
    """Weights of the target."""
    h, inner, heads, kv, dim = (
        SHARED[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = 2 * h * heads * dim + 2 * h * kv * dim + 3 * h * inner + 2 * h
    return int(LAYERS * layer + 2 * SHARED["vocab_size"] * h + h)


def write(folder: Path, tokenizer: Path) -> tuple[Path, Path]:
    """Write (target, drafter) below `folder`; the tokenizer is taken from the model in `tokenizer`."""
    target, drafter = folder / "target", folder / "drafter"
    for path, own in ((target, TARGET), (drafter, DRAFTER)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(SHARED | own, indent=1))
    for name in TOKENIZER:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, target)
    return target, drafter
