"""What a step reads from the request table, read once: the drafter's block, the slots of block and tree, and the
attention plan of both forwards.

What this module does not do: allocate slots (the scheduler did, two steps ahead), or decide who may plan (`plan`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_SPLITS = 16  # programs that share the copy of one request's context


@dataclass(frozen=True)
class Plan:
    """One backend's captured metadata of verify forwards, for R requests; the first element of each pointer array is 0.

    Attributes:
        kv_indptr: int32 [≥ R+1], where each request's context begins in `kv_indices`.
        kv_indices: int64 [≥ R · context], the KV slots of the contexts, one request after the other.
        qo_indptr: int64 [≥ R+1], where each request's rows begin.
        mask_indptr: int64 [≥ R+1], where each request's mask begins; written, read or not.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    qo_indptr: Tensor
    mask_indptr: Tensor


@dataclass(frozen=True)
class StepPlan:
    """Both forwards' plans. `rows`: requests that they are written for; those beyond the batch see one slot of context,
    as SGLang pads them."""

    draft: Plan
    verify: Plan
    rows: int


def prepare_step(
    roots: Tensor,
    starts: Tensor,
    requests: Tensor,
    table: Tensor,
    mask_token: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: StepPlan | None = None,
) -> None:
    """Fill the step's inputs for B requests in one launch.

    Args:
        roots: int64 [B], last committed tokens. starts: int [B], their positions. requests: int [B], table rows.
        table: int [requests, positions], row-major: the KV slot of each position.
        mask_token: id of the drafter's mask.
        out: block ids int64 [B, block], positions int64 [B, block], the block's slots int64 [B, block], and the tree's
            slots int64 [B, N]; all contiguous.
        plan: also fill these; B ≤ its rows.
    """
    ids, positions, block_slots, slots = out
    batch, block = ids.shape
    width = slots.shape[1]
    unused = Plan(starts, starts, starts, starts)
    draft, verify = (plan.draft, plan.verify) if plan is not None else (unused, unused)
    rows = plan.rows if plan is not None else batch
    _prepare[(rows, _SPLITS if plan is not None else 1)](
        roots, starts, requests, table, ids, positions, block_slots, slots,
        draft.kv_indptr, draft.kv_indices, draft.qo_indptr, draft.mask_indptr,
        verify.kv_indptr, verify.kv_indices, verify.qo_indptr, verify.mask_indptr,
        table.stride(0), table.shape[1], mask_token, batch, block, width,
        COLUMNS=triton.next_power_of_2(max(block, width)),
        ROWS=triton.next_power_of_2(rows) if plan is not None else 1,
        PLAN=plan is not None, SPLITS=_SPLITS, CHUNK=256, num_warps=2,
    )  # fmt: skip


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    roots, starts, requests, table, ids, positions, block_slots, slots,
    draft_kv_indptr, draft_kv_indices, draft_qo_indptr, draft_mask_indptr,
    verify_kv_indptr, verify_kv_indices, verify_qo_indptr, verify_mask_indptr,
    stride, length, mask_token, batch, block, width,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, PLAN: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    real = request < batch
    known = tl.minimum(request, batch - 1)  # padding loads what is there, and uses none of it
    start = tl.where(real, tl.load(starts + known).to(tl.int64), 1)
    row = table + tl.load(requests + known).to(tl.int64) * stride
    if split == 0:
        column = tl.arange(0, COLUMNS)
        position = start + column
        inside = column < tl.where(real, block, 0)
        in_tree = column < tl.where(real, width, 0)
        slot = tl.load(row + position, mask=(inside | in_tree) & (position < length), other=0).to(tl.int64)
        root = tl.load(roots + known)
        tl.store(ids + request * block + column, tl.where(column == 0, root, mask_token), mask=inside)
        tl.store(positions + request * block + column, position, mask=inside)
        tl.store(block_slots + request * block + column, slot, mask=inside)
        tl.store(slots + request * width + column, slot, mask=in_tree)
    if PLAN:
        other = tl.arange(0, ROWS)
        lengths = tl.load(starts + other, mask=other < batch, other=1).to(tl.int64)
        begin = tl.sum(tl.where(other < request, lengths, 0))
        if split == 0:
            number = request + 1
            end = begin + start
            tl.store(draft_kv_indptr + number, end)
            tl.store(verify_kv_indptr + number, end)
            tl.store(draft_qo_indptr + number, number * block)
            tl.store(verify_qo_indptr + number, number * width)
            tl.store(draft_mask_indptr + number, block * (end + number * block))
            tl.store(verify_mask_indptr + number, width * (end + number * width))
        at = tl.arange(0, CHUNK)
        for chunk in range(tl.cdiv(start - split * CHUNK, SPLITS * CHUNK)):
            place = (chunk * SPLITS + split) * CHUNK + at
            kept = tl.load(row + place, mask=place < tl.where(real, start, 0), other=0).to(tl.int64)
            tl.store(draft_kv_indices + begin + place, kept, mask=place < start)
            tl.store(verify_kv_indices + begin + place, kept, mask=place < start)
