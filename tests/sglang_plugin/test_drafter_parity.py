"""The shipped drafter drafts the same in the embedded engine and in SGLang's model class, in float32 on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_app.engines.local.attention import open_window
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.drafter import Drafter, DrafterSpec
from serve_app.engines.local.kv_cache import KVCache
from serve_app.models import resolve, resolve_drafter
from tests.conftest import ROOT, require_sglang
from tests.sglang_plugin.conftest import CPU_KERNELS

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
CPU, CAPACITY = torch.device("cpu"), 256
TEXT = "List three facts about binary search, then write it.\ndef search(items, wanted):\n    low, high = 0, len("
# Tokens of context; the block stands behind them.
CONTEXTS = (1, 2, 7, 13, 20, 28)


def embedded_hidden(drafter: Drafter, features: Tensor, block: Tensor) -> Tensor:
    """[b − 1, hidden] of the embedded engine's drafter, for a block's embeddings behind a context."""
    spec, shape, start = drafter.spec, drafter.shape, len(features)
    cache = KVCache(1, CAPACITY, shape.layers, shape.kv_heads, shape.head_dim, CPU, torch.float32)
    at = torch.arange(start)
    drafter.append_context(features, at, at, cache)
    places = torch.arange(start, start + spec.block_size)
    everything = torch.ones(1, spec.block_size, spec.block_size, dtype=torch.bool)
    groups = shape.heads // shape.kv_heads
    window = open_window(slice(0, 1), torch.tensor([start]), everything, CAPACITY, groups, torch.float32)
    return drafter.forward(block[None], places[None], places, cache, window)[0]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.inference_mode()
def test_hidden_states_and_draft_logits_are_sglangs(tmp_path: Path) -> None:
    require_sglang()
    files = resolve("smollm2-135m", progress=False)
    where = resolve_drafter("auto", files)
    assert where is not None
    checkpoint = Checkpoint(where, CPU, torch.float32, param="model.drafter")
    spec = DrafterSpec.read(checkpoint.config)
    drafter = Drafter(checkpoint, spec, CAPACITY)

    target = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(files.path)(TEXT, return_tensors="pt")["input_ids"]
    states = target(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in spec.feature_layers], -1)
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    cases = []
    for length in CONTEXTS:
        ids = torch.full((spec.block_size,), spec.mask_token)
        ids[0] = tokens[0, length]
        cases.append((features[:length].clone(), embedding[ids].clone()))

    torch.save(cases, tmp_path / "cases.pt")
    command = [sys.executable, "-m", "tests.sglang_plugin.draft_model", "cases.pt", "result.pt", files.path, where]
    command[3:5] = [str(tmp_path / name) for name in command[3:5]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(CPU_KERNELS)))}
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

    worst = {"hidden": 0.0, "logits": 0.0, "hidden_abs": 0.0, "logits_abs": 0.0}
    for case, sglangs in zip(cases, torch.load(tmp_path / "result.pt"), strict=True):
        ours, theirs = embedded_hidden(drafter, *case), sglangs[1:]
        logits, their_logits = ours @ head.T, theirs @ head.T
        assert torch.equal(logits.argmax(-1), their_logits.argmax(-1))
        for name, mine, other in (("hidden", ours, theirs), ("logits", logits, their_logits)):
            worst[name] = max(worst[name], gap(mine, other))
            worst[f"{name}_abs"] = max(worst[f"{name}_abs"], float((mine - other).abs().max()))
    print(f"largest differences over {len(cases)} blocks: {worst}")
    assert worst["hidden"] < 1e-5 and worst["logits"] < 1e-5
