"""What a step hands to SGLang: the verify input of a tree, and the draft state between steps with its KV reservation.

What this module does not do: build trees, or run forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from serve_app.sglang_plugin.args import Options, options


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """A draft tree in SGLang's encoding; attention backends treat it as EAGLE's, which is the one that has a mask."""

    @property
    def max_tree_depth(self) -> int:
        """P, the longest accepted path with the root."""
        return int(self.spec_steps) + 1

    @property
    def tree_topk(self) -> int:
        return -1  # no fixed branching per level

    def prepare_for_verify(self, batch: Any, target_worker: Any) -> ForwardBatch:
        """The verify forward, planned for replay if a graph takes it.

        Args:
            batch: SGLang's ScheduleBatch of the running step; `out_cache_loc` int64 [B·N] is already set, gathered once
                before the draft. It must not be read from the request table again: once the scheduler is told that this
                step has read the table, it may rewrite it.
        """
        batch.input_ids = self.draft_token
        batch.spec_info = self
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        forward_batch = ForwardBatch.init_new(
            batch,
            target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )
        runner = target_worker.model_runner.decode_cuda_graph_runner
        if runner and runner.can_run_graph(forward_batch):
            runner.load_batch(forward_batch)
            forward_batch.mark_forward_metadata_ready()
        return forward_batch


def verify_input(
    chosen: Options, mask: Tensor, tokens: Tensor, positions: Tensor, links: tuple[Tensor, Tensor, Tensor]
) -> DDTreeVerifyInput:
    """The verify input of B trees.

    Args:
        mask: flat, per request N × (prefix + N) row-major, non-zero where a row may look; see `tree.write_mask`.
        tokens, positions: int64 [B·N].
        links: int64 [B, N] each: retrieve_index, retrieve_next_token, retrieve_next_sibling.
    """
    return _verify_input(chosen, mask, tokens, positions, *links)


def capture_verify_input(chosen: Options, mask: Tensor) -> DDTreeVerifyInput:
    """What the verify graph is captured with: shapes, and the mask's memory."""
    return _verify_input(chosen, mask)


def _verify_input(chosen: Options, mask: Tensor, *tensors: Tensor) -> DDTreeVerifyInput:
    tokens, positions, index, next_token, next_sibling = tensors or (None,) * 5
    return DDTreeVerifyInput(
        draft_token=tokens,
        custom_mask=mask,
        positions=positions,
        retrieve_index=index,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_cum_len=None,
        spec_steps=chosen.depth,
        topk=chosen.topk,
        draft_token_num=chosen.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """The bonus tokens that the next step starts from; DFLASH's state with a page-aligned reservation for a tree."""

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve the KV slots of this step and the next, in the scheduler, before the step is launched.

        The host lags one step behind under overlap, hence two steps' worth. The reservation ends on a page: the
        allocator hands out whole pages, and what is not recorded as allocated would never be freed.
        """
        size = batch.batch_size()
        if size == 0:
            return
        self._ensure_prepare_length_buffers(size, batch.device)
        committed = self._prepare_batch_seq_lens_cpu_buf[:size]
        current, following = self._prepare_cur_kv_lens_cpu_buf[:size], self._prepare_nxt_kv_lens_cpu_buf[:size]
        lengths = [(int(req.kv_committed_len), int(req.kv.kv_allocated_len)) for req in batch.reqs]
        page = batch.token_to_kv_pool_allocator.page_size
        ahead = 2 * options(get_server_args()).slots
        wanted = [max(allocated, -(-(length + ahead) // page) * page) for length, allocated in lengths]
        needed = sum(wanted) - sum(allocated for _, allocated in lengths)
        committed.copy_(torch.tensor([length for length, _ in lengths]))
        current.copy_(torch.tensor([allocated for _, allocated in lengths], dtype=torch.int32))
        following.copy_(torch.tensor(wanted, dtype=torch.int32))
        if needed:
            current_gpu = self._prepare_cur_kv_lens_gpu_buf[:size]
            following_gpu = self._prepare_nxt_kv_lens_gpu_buf[:size]
            current_gpu.copy_(current, non_blocking=True)
            following_gpu.copy_(following, non_blocking=True)
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=current_gpu,
                cur_kv_lens_cpu=current,
                nxt_kv_lens=following_gpu,
                nxt_kv_lens_cpu=following,
                num_needed_tokens=needed,
                batch=batch,
            )
        batch.seq_lens_cpu = committed
        batch.seq_lens_sum = sum(length for length, _ in lengths)
        self.reserved_seq_lens_cpu = following
        self.reserved_seq_lens_sum = sum(wanted)

    @classmethod
    def of(cls, bonus_tokens: Tensor, new_seq_lens: Tensor) -> DDTreeDraftInput:
        """From a finished step: int64 [B] each."""
        topk_p, topk_index, hidden_states = _nothing(new_seq_lens.shape[0], bonus_tokens.device)
        return cls(
            topk_p=topk_p,
            topk_index=topk_index,
            bonus_tokens=bonus_tokens,
            new_seq_lens=new_seq_lens,
            hidden_states=hidden_states,
        )


@lru_cache(maxsize=1024)
def _nothing(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What SGLang's draft state carries and DDTREE does not use, [B, 0] each; one of each size, they hold no data."""
    return (
        torch.empty((size, 0), device=device),
        torch.empty((size, 0), device=device, dtype=torch.int64),
        torch.empty((size, 0), device=device, dtype=torch.float16),
    )
