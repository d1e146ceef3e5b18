"""A second SGLang plugin, for tests: with DDTREE_DUMP=FILE the drafter's inputs and outputs are saved for comparison.

Saved is a list: ("context", features [M, F], positions [M], rows that count) and ("draft", block ids [b], first
position, hidden [b, H]) in the order in which they happened, and ("logits", [D, V]) after each draft. Only an engine
without CUDA graphs calls these functions on every step.

What this module does not do: anything unless the variable is set.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_events: list[tuple[Any, ...]] = []
_DRAFTS = 16


def register() -> None:
    if "DDTREE_DUMP" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    worker = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc"
    HookRegistry.register(worker, _context, HookType.BEFORE)
    HookRegistry.register("sglang.srt.models.dflash.DFlashDraftModel.forward", _draft, HookType.AROUND)
    HookRegistry.register("serve_app.sglang_plugin.topk.topk_logprobs", _logits, HookType.BEFORE)


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _full() -> bool:
    return sum(event[0] == "draft" for event in _events) > _DRAFTS


def _context(worker: Any, **fields: Any) -> None:
    if _full():
        return
    lengths = fields.get("commit_lens")
    rows = len(fields["positions"]) if lengths is None else int(lengths[0])
    _events.append(("context", _cpu(fields["target_hidden"]), _cpu(fields["positions"]), rows))


def _draft(
    original: Any, model: Any, input_ids: Any, positions: Any, forward_batch: Any, *rest: Any, **more: Any
) -> Any:
    result = original(model, input_ids, positions, forward_batch, *rest, **more)
    if _events and not _full():
        _events.append(("draft", _cpu(input_ids), int(positions[0]), _cpu(result.hidden_states)))
    return result


def _logits(logits: torch.Tensor, *rest: Any, **more: Any) -> None:
    if _events and _events[-1][0] == "draft" and not _full():
        _events.append(("logits", _cpu(logits)))
        torch.save(_events, os.environ["DDTREE_DUMP"])
