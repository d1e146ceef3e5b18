"""What a step reads from the request table, read once: the drafter's block and the slots of block and tree.

What this module does not do: allocate slots (the scheduler did, two steps ahead).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def prepare_step(
    roots: Tensor,
    starts: Tensor,
    requests: Tensor,
    table: Tensor,
    mask_token: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill the step's inputs for B requests in one launch.

    Args:
        roots: int64 [B], last committed tokens. starts: int [B], their positions. requests: int [B], table rows.
        table: int [requests, positions], row-major: the KV slot of each position.
        mask_token: id of the drafter's mask.
        out: block ids int64 [B, block], positions int64 [B, block], the block's slots int64 [B, block], and the tree's
            slots int64 [B, N]; all contiguous.
    """
    ids, positions, block_slots, slots = out
    batch, block = ids.shape
    width = slots.shape[1]
    _prepare[(batch,)](
        roots, starts, requests, table, ids, positions, block_slots, slots, table.stride(0), table.shape[1], mask_token,
        block, width, COLUMNS=triton.next_power_of_2(max(block, width)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    roots, starts, requests, table, ids, positions, block_slots, slots, stride, length, mask_token, block, width,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    position = tl.load(starts + request).to(tl.int64) + column
    row = table + tl.load(requests + request).to(tl.int64) * stride
    wanted = (column < block) | (column < width)
    slot = tl.load(row + position, mask=wanted & (position < length), other=0).to(tl.int64)
    root = tl.load(roots + request)
    inside = column < block
    tl.store(ids + request * block + column, tl.where(column == 0, root, mask_token), mask=inside)
    tl.store(positions + request * block + column, position, mask=inside)
    tl.store(block_slots + request * block + column, slot, mask=inside)
    tl.store(slots + request * width + column, slot, mask=column < width)
