"""What a step hands to SGLang: the verify input of a tree, and the draft state between steps with its KV reservation.

What this module does not do: build trees, or run forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult, _async_d2h
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.utils.common import is_pin_memory_available
from torch import Tensor

from serve_app.sglang_plugin.args import Options, slots_per_step

# KV slots that a request is given at once beyond what its next two steps may write.
RESERVE = 128


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
class StepResult(GenerationBatchResult):
    """A step's result of which only tokens and lengths reach the host: one copy instead of one each.

    Attributes:
        flat: int64, the memory that `next_token_ids` [B·P] and `accept_lens` [B] are views of.
    """

    flat: Tensor | None = None

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        """Start the copy on the current stream; the views are the host's then, valid once `copy_done` has happened."""
        assert self.flat is not None and not return_logprob
        host, start = _async_d2h(self.flat), self.flat.storage_offset()
        for name in ("next_token_ids", "accept_lens"):
            view = getattr(self, name)
            setattr(self, name, host.narrow(0, view.storage_offset() - start, view.numel()))
        self.copy_done.record()


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """The bonus tokens that the next step starts from; DFLASH's state with a page-aligned reservation for a tree."""

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve the KV slots of this step and the next, in the scheduler, before the step is launched.

        The host lags one step behind under overlap, hence two steps' worth. The reservation ends on a page: the
        allocator hands out whole pages, and what is not recorded as allocated would never be freed. Where the pool has
        room, some steps are reserved at once: most steps then allocate nothing.
        """
        reqs = batch.reqs
        if not reqs:
            return
        lengths = [int(req.kv_committed_len) for req in reqs]
        allocated = [int(req.kv.kv_allocated_len) for req in reqs]
        page = batch.token_to_kv_pool_allocator.page_size
        ahead = 2 * slots_per_step(get_server_args())
        wanted = [max(have, _pages(length + ahead, page)) for length, have in zip(lengths, allocated, strict=True)]
        if wanted != allocated:
            wanted = _with_reserve(batch, lengths, allocated, wanted)
            _allocate(batch, allocated, wanted)
        batch.seq_lens_cpu = torch.tensor(lengths)
        batch.seq_lens_sum = sum(lengths)
        self.reserved_seq_lens_cpu = torch.tensor(wanted, dtype=torch.int32)
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


def _pages(length: int, page: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // page) * page


def _with_reserve(batch: Any, lengths: list[int], allocated: list[int], wanted: list[int]) -> list[int]:
    """`wanted` with `RESERVE` more, for all requests at once, if the pool has several times that to spare.

    Never more than a request can come to use, and never beyond its row of the request table.
    """
    page = batch.token_to_kv_pool_allocator.page_size
    spare = batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()
    if spare - sum(wanted) + sum(allocated) < 4 * len(wanted) * (RESERVE + page):
        return wanted
    row = batch.req_to_token_pool.req_to_token.shape[1] // page * page
    ahead = 2 * slots_per_step(get_server_args())
    grown = []
    for req, length, want in zip(batch.reqs, lengths, wanted, strict=True):
        end = len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens) + ahead
        grown.append(max(want, min(_pages(min(length + ahead + RESERVE, end), page), row)))
    return grown


def _allocate(batch: Any, allocated: list[int], wanted: list[int]) -> None:
    """Grow each request's allocation from `allocated` to `wanted` slots."""
    # Pinned, and new each time: the device may not have read those of the step before yet.
    pinned = is_pin_memory_available(batch.device)
    current, following = (torch.tensor(n, dtype=torch.int32, pin_memory=pinned) for n in (allocated, wanted))
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=current.to(batch.device, non_blocking=True),
        cur_kv_lens_cpu=current,
        nxt_kv_lens=following.to(batch.device, non_blocking=True),
        nxt_kv_lens_cpu=following,
        num_needed_tokens=sum(wanted) - sum(allocated),
        batch=batch,
    )


@lru_cache(maxsize=1024)
def _nothing(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What SGLang's draft state carries and DDTREE does not use, [B, 0] each; one of each size, they hold no data."""
    return (
        torch.empty((size, 0), device=device),
        torch.empty((size, 0), device=device, dtype=torch.int64),
        torch.empty((size, 0), device=device, dtype=torch.float16),
    )
