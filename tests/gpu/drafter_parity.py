"""The embedded engine's drafter fed with what SGLang's saw: hidden states, draft logits and best tokens compared.

What this module does not do: run SGLang (`dump_plugin` saved what it computed).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from serve_app.engines.local.attention import open_window
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.drafter import Drafter, DrafterSpec
from serve_app.engines.local.kv_cache import KVCache

CPU = torch.device("cpu")


@torch.inference_mode()
def parity(dump: Path, drafter_path: Path, model_path: Path) -> dict[str, Any]:
    """Largest differences over all saved drafts of one request, in float32, relative to the largest SGLang value."""
    events = torch.load(dump)
    checkpoint = Checkpoint(drafter_path, CPU, torch.float32, param="model.drafter")
    spec = DrafterSpec.read(checkpoint.config)
    embedding = _embedding(model_path)
    capacity = 1024
    drafter, shape = Drafter(checkpoint, spec, capacity), spec.shape
    cache = KVCache(1, capacity, shape.layers, shape.kv_heads, shape.head_dim, CPU, torch.float32)
    hidden_gap = logit_gap = 0.0
    drafts = agreeing = rows = 0
    found: Tensor | None = None
    for kind, *values in events:
        if kind == "context":
            features, positions, count = values
            drafter.append_context(features[:count].float(), positions[:count], positions[:count], cache)
        elif kind == "draft":
            ids, start, hidden = values
            places = torch.arange(start, start + spec.block_size)
            everything = torch.ones(1, spec.block_size, spec.block_size, dtype=torch.bool)
            groups = shape.heads // shape.kv_heads
            window = open_window(slice(0, 1), torch.tensor([start]), everything, capacity, groups, torch.float32)
            found = drafter.forward(embedding[ids][None], places[None], places, cache, window)[0]
            theirs = hidden.view(spec.block_size, -1)[1:].float()
            hidden_gap = max(hidden_gap, float((found - theirs).abs().max() / theirs.abs().max()))
            drafts += 1
        else:
            assert found is not None
            theirs = values[0].float()
            ours = found[: len(theirs)] @ embedding.T
            logit_gap = max(logit_gap, float((ours - theirs).abs().max() / theirs.abs().max()))
            agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            rows += len(theirs)
    return {
        "drafts": drafts, "hidden": hidden_gap, "logits": logit_gap, "rows": rows, "same best token": agreeing
    }  # fmt: skip


def _embedding(model_path: Path) -> Tensor:
    """The target's embedding, which is its head too."""
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(str(file), "pt") as weights:
            if "model.embed_tokens.weight" in weights.keys():  # noqa: SIM118 (not a mapping)
                return weights.get_tensor("model.embed_tokens.weight").float()
    raise FileNotFoundError(f"{model_path} has no embedding")
