"""CUDA graphs of the verify step: the mask captured in them, the memory they may take, and why a forward ran eagerly.

What this module does not do: capture or replay (SGLang's runners do), or decide anything in the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

import torch

from serve_app.sglang_plugin.args import options

logger = logging.getLogger(__name__)


class Fallback(StrEnum):
    """Why a verify or draft forward was not a graph replay; the values are a metric's label."""

    NO_RUNNER = "no_runner"  # graphs are off, or there was no memory to capture them
    EAGER_RUNNER = "eager_runner"
    MODE = "mode_not_graphable"
    REPLACE_EMBEDS = "replace_embeds"
    RAGGED = "ragged_verify"
    WIDTH = "width_mismatch"
    BATCH_TOO_LARGE = "bs_exceeds_max"
    SHAPE = "shape_not_captured"
    DP_SYNC = "dp_sync"
    ENCODER_LENS = "encoder_lens"
    TBO = "tbo"
    NGRAM_TOKENS = "ngram_tokens"
    DRAFT_HEAD = "draft_head_eager"  # the draft forward was replayed, its top-k and tree were not in the graph


def fallback_reason(runner: Any, forward_batch: Any) -> Fallback:
    """Why `DecodeCudaGraphRunner.can_run_graph` (or its caller) refused the batch. Pure, and without a GPU sync.

    Args:
        runner: `ModelRunner.decode_cuda_graph_runner`, or None.
        forward_batch: the refused batch. The conditions and their order are those of sglang 0.5.17; what is left when
            none of the others holds is the encoder's, whose own test would synchronise.
    """
    if runner is None:
        return Fallback.NO_RUNNER
    if type(runner).__name__ == "EagerRunner":
        return Fallback.EAGER_RUNNER
    if not forward_batch.forward_mode.is_cuda_graph():
        return Fallback.MODE
    if forward_batch.replace_embeds is not None:
        return Fallback.REPLACE_EMBEDS
    if runner.ragged_verify_mode:
        return Fallback.RAGGED
    spec_info = forward_batch.spec_info
    if spec_info is not None and 0 < spec_info.num_tokens_per_req != runner.captured_req_width:
        return Fallback.WIDTH
    if runner.disable_padding:
        if not _captured(runner, forward_batch):
            return Fallback.SHAPE
    elif _graph_batch_size(runner, forward_batch) > runner.max_bs:
        return Fallback.BATCH_TOO_LARGE
    if runner.require_mlp_sync and not forward_batch.can_run_dp_cuda_graph:
        return Fallback.DP_SYNC
    if runner.enable_two_batch_overlap and not forward_batch.can_run_tbo:
        return Fallback.TBO
    if runner.is_encoder_decoder:
        return Fallback.ENCODER_LENS
    return Fallback.NGRAM_TOKENS


def _graph_batch_size(runner: Any, forward_batch: Any) -> int:
    if runner.require_mlp_tp_gather:
        return int(max(forward_batch.original_global_num_tokens_cpu))
    return int(forward_batch.batch_size)


def _captured(runner: Any, forward_batch: Any) -> bool:
    key = runner._make_graph_key(
        _graph_batch_size(runner, forward_batch), variant_label=runner._resolve_lora_variant(forward_batch)
    )
    return bool(runner.backend.can_run(forward_batch, key))


def count_forward(model_runner: Any, forward_batch: Any, replayed: bool) -> None:
    """One verify or draft forward: a replay with its padding, or a fallback with its reason."""
    from serve_app.sglang_plugin import metrics

    role = "draft" if model_runner.is_draft_worker else "target"
    runner = model_runner.decode_cuda_graph_runner
    if replayed:
        metrics.graph_replay(role, runner.bs - runner.raw_bs, runner.bs)
    else:
        metrics.graph_fallback(role, fallback_reason(runner, forward_batch))


def measured_capture(role: str, graphs: int, capture: Callable[[], None]) -> None:
    """Run `capture` and tell the metrics its time and the device memory that it reserved."""
    from serve_app.sglang_plugin import metrics

    started, reserved = time.perf_counter(), torch.cuda.memory_reserved()
    capture()
    grown = max(torch.cuda.memory_reserved() - reserved, 0)
    metrics.graph_capture(role, graphs, time.perf_counter() - started, grown)


def bound_triton_state(original: Callable[..., None], backend: Any, max_bs: int, max_num_tokens: int) -> None:
    """Size the captured state by requests instead of rows.

    The verify path indexes the committed context only, once per request, and never runs the decode kernel; SGLang sizes
    its index and its split buffers for every row attending to a context of its own.
    """
    original(backend, max_bs, max_bs)
    if backend.use_sliding_window_kv_pool:
        backend.cuda_graph_swa_out_cache_loc = backend.cuda_graph_swa_out_cache_loc.new_zeros(max_num_tokens)
    if backend._translate_kv_loc is not None:
        backend.cuda_graph_out_cache_loc_full_physical = backend.cuda_graph_out_cache_loc_full_physical.new_zeros(
            max_num_tokens
        )
    if backend.verify_mask is not None:
        backend.verify_mask.buffer.fill_(1)


def bound_flashinfer_state(original: Callable[..., None], backend: Any, max_bs: int, max_num_tokens: int) -> None:
    """Likewise: each request's pages are listed once, the rows of its tree included."""
    rows = max_num_tokens // max_bs
    size = max_bs * (backend.max_context_len + 2 * rows)
    original(backend, max_bs, max_num_tokens, torch.zeros(size, dtype=torch.int32, device="cuda"))


@cache
def verify_runner_class() -> type:
    """The target's graph runner: SGLang's, capturing a tree with a mask instead of DFLASH's causal chain."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    from serve_app.sglang_plugin.inputs import capture_verify_input

    class DDTreeVerifyGraphRunner(DecodeCudaGraphRunner):
        def capture(self) -> None:
            measured_capture("target", len(self.capture_bs), super().capture)

        def get_spec_info(self, num_tokens: int) -> Any:
            verify_mask = self.attn_backend.verify_mask
            mask = self.buffers.custom_mask if verify_mask is None else verify_mask.buffer
            return capture_verify_input(options(self.model_runner.server_args), mask)

    return DDTreeVerifyGraphRunner


def state_bytes(model_runner: Any) -> dict[str, int]:
    """What the tree costs beside weights and KV cache, in bytes: printed at start."""
    runner = model_runner.decode_cuda_graph_runner
    backend = model_runner.attn_backend
    sizes = {}
    if backend.verify_mask is not None:
        sizes["tree mask"] = _bytes(backend.verify_mask.buffer)
    for name, label in (
        ("cuda_graph_kv_indices", "kv indices"),
        ("cuda_graph_attn_logits", "split buffers"),
        ("cuda_graph_custom_mask", "packed tree mask"),
    ):
        value = getattr(backend, name, None)
        for tensor in value if isinstance(value, list) else [value]:
            if tensor is not None:
                sizes[label] = sizes.get(label, 0) + _bytes(tensor)
    logits = getattr(getattr(runner, "buffers", None), "next_token_logits_buffer", None)
    if logits is not None:
        sizes["logits"] = _bytes(logits)
    return sizes


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
