"""Draft trees of a fixed size on the GPU, in SGLang's encoding, without a host loop or a synchronisation.

One program per request walks the best-first order over the drafter's candidates: always the heaviest of "next sibling"
and "first child" over all nodes taken so far, after the whole top-1 chain where that is asked for. The result is the
tree of `serve_app.ddtree.tree`: the same nodes and links wherever no two weights are equal, and the same weights in any
case (among equals, the earlier node's child, then its sibling, comes first). A node's index is above its parent's, so a
causal bound on rows is safe.

Links, as SGLang's verify walks them: next_token is a node's first child, next_sibling the parent's next child, -1 for
none; retrieve_index is the node's row in the flat batch.

What this module does not do: draft, or verify.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.sglang_plugin.args import Options

# Log-probs below this count as this: finite, so that a full tree always exists.
FLOOR = -1e30


@dataclass(frozen=True)
class TreeBuffers:
    """Trees of the current step: written by the draft graph, read by the verify graph; row b is request b.

    Attributes, int64 [B, N] each:
        tokens: what the node proposes; the root is the last committed token.
        positions: the node's position in the sequence.
        parents: index of the parent node, -1 for the root.
        index, next_token, next_sibling: SGLang's links, see the module.
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    index: Tensor
    next_token: Tensor
    next_sibling: Tensor

    @staticmethod
    def allocate(batch: int, width: int, device: torch.device | str) -> TreeBuffers:
        """Zeroed, except the links, which are chains' ends: a forward may be captured before any tree was built."""
        none = [torch.full((batch, width), -1, dtype=torch.int64, device=device) for _ in range(3)]
        zero = [torch.zeros((batch, width), dtype=torch.int64, device=device) for _ in range(3)]
        return TreeBuffers(zero[0], zero[1], none[0], zero[2], none[1], none[2])

    def first(self, batch: int) -> TreeBuffers:
        """Views of the first `batch` requests."""
        return TreeBuffers(*(getattr(self, name)[:batch] for name in self.__dataclass_fields__))

    @property
    def links(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.index, self.next_token, self.next_sibling


def build_trees(
    out: TreeBuffers, roots: Tensor, starts: Tensor, tokens: Tensor, logps: Tensor, chosen: Options
) -> None:
    """Fill `out` with the trees of its B requests.

    Args:
        roots: int64 [B], any stride: last committed tokens. starts: int [B]: their positions.
        tokens: int64 [B, D, K], candidates per depth, contiguous. logps: float32 [B, D, K], descending along K.
        chosen: N = `width`, D = `depth` and `spine_first` of it are used; K is the tensors'.
    """
    batch, depth, k = tokens.shape
    _build[(batch,)](
        tokens, logps, roots, starts, out.tokens, out.positions, out.parents, out.index, out.next_token,
        out.next_sibling, roots.stride(0), chosen.width, depth, k, FLOOR,
        SPINE=int(chosen.spine_first), LANES=triton.next_power_of_2(chosen.width), num_warps=1,
    )  # fmt: skip


def write_mask(mask: Tensor, parents: Tensor, starts: Tensor, *, whole: bool = False) -> None:
    """Write the trees' cells of SGLang's verify mask; those of the committed prefix are left as they are, which where
    `mask` has been used before may be anything.

    Args:
        mask: flat; request b owns N × (starts[b] + N) cells, row-major, requests in order. Non-zero: row may look.
        parents: int64 [B, N]. starts: int [B], committed tokens.
        whole: also let every row look at the committed prefix, for kernels that read those cells.
    """
    batch, width = parents.shape
    _mask[(batch, width)](
        mask, parents, starts, width, WHOLE=whole, CHUNK=1024,
        LANES=triton.next_power_of_2(width), REQUESTS=triton.next_power_of_2(batch), num_warps=1,
    )  # fmt: skip


@triton.jit
def _build(  # type: ignore[no-untyped-def]
    tokens, logps, roots, starts, out_tokens, out_positions, out_parents, out_index, out_next_token, out_next_sibling,
    root_stride, width, depths, k, FLOOR, SPINE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    tokens += request * depths * k
    logps += request * depths * k
    lane = tl.arange(0, LANES)
    none = tl.full((LANES,), float("-inf"), tl.float32)
    minus = tl.full((LANES,), -1, tl.int32)
    # Per node: its weight, its parent's weight, and the weights of what it offers (-inf: nothing, or taken).
    weight = tl.zeros((LANES,), tl.float32)
    above = tl.zeros((LANES,), tl.float32)
    child = tl.where((lane == 0) & (SPINE == 0), tl.maximum(tl.load(logps), FLOOR), none)
    sibling = none
    # parent | depth << 8 | rank << 16, of nodes other than the root.
    packed = tl.zeros((LANES,), tl.int32)
    token = tl.where(lane == 0, tl.load(roots + request * root_stride), 0)
    next_token = minus
    next_sibling = minus
    spine = tl.minimum(depths, width - 1) * SPINE
    path = tl.full((), 0.0, tl.float32)
    for level in range(spine):
        here = lane == level + 1
        above = tl.where(here, path, above)
        if k > 1:
            sibling = tl.where(here, path + tl.maximum(tl.load(logps + level * k + 1), FLOOR), sibling)
        path = path + tl.maximum(tl.load(logps + level * k), FLOOR)
        weight = tl.where(here, path, weight)
        packed = tl.where(here, level | ((level + 1) << 8), packed)
        token = tl.where(here, tl.load(tokens + level * k), token)
        next_token = tl.where(lane == level, level + 1, next_token)
    for node in range(spine + 1, width):
        offer = tl.maximum(child, sibling)
        best = tl.max(offer, 0)
        source = tl.min(tl.where(offer == best, lane, LANES), 0)
        at = lane == source
        is_child = child == best
        fields = tl.sum(tl.where(at, packed | (is_child.to(tl.int32) << 30), 0), 0)
        base = tl.sum(tl.where(at, tl.where(is_child, weight, above), 0.0), 0)
        descend = (fields >> 30) == 1
        parent = tl.where(descend, source, fields & 255)
        depth = ((fields >> 8) & 255) + descend.to(tl.int32)
        rank = tl.where(descend, 0, ((fields >> 16) & 255) + 1)
        row = (depth - 1) * k
        here = lane == node
        weight = tl.where(here, best, weight)
        above = tl.where(here, base, above)
        packed = tl.where(here, parent | (depth << 8) | (rank << 16), packed)
        token = tl.where(here, tl.load(tokens + row + rank), token)
        child = tl.where(at & descend, float("-inf"), child)
        sibling = tl.where(at & (descend == 0), float("-inf"), sibling)
        next_token = tl.where(at & descend, node, next_token)
        next_sibling = tl.where(at & (descend == 0), node, next_sibling)
        more = rank + 1 < k
        beside = tl.load(logps + row + rank + 1, mask=more, other=0.0)
        sibling = tl.where(here & more, base + tl.maximum(beside, FLOOR), sibling)
        deeper = depth < depths
        below = tl.load(logps + row + k, mask=deeper, other=0.0)
        child = tl.where(here & deeper, best + tl.maximum(below, FLOOR), child)
    live = lane < width
    to = request * width + lane
    start = tl.load(starts + request).to(tl.int64)
    tl.store(out_tokens + to, token, mask=live)
    tl.store(out_positions + to, start + ((packed >> 8) & 255), mask=live)
    tl.store(out_parents + to, tl.where(lane == 0, -1, packed & 255).to(tl.int64), mask=live)
    tl.store(out_index + to, to, mask=live)
    tl.store(out_next_token + to, next_token.to(tl.int64), mask=live)
    tl.store(out_next_sibling + to, next_sibling.to(tl.int64), mask=live)


@triton.jit
def _mask(  # type: ignore[no-untyped-def]
    mask, parents, starts, width, WHOLE: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    node = tl.program_id(1)
    others = tl.arange(0, REQUESTS)
    earlier = others < request
    lengths = tl.load(starts + others, mask=earlier, other=0).to(tl.int64)
    before = tl.sum(tl.where(earlier, lengths + width, 0), 0) * width
    start = tl.load(starts + request).to(tl.int64)
    column = tl.arange(0, LANES)
    parents += request.to(tl.int64) * width
    sees = column == node
    ancestor = tl.load(parents + node)
    while ancestor >= 0:
        sees = sees | (column == ancestor)
        ancestor = tl.load(parents + ancestor)
    row = mask + before + node * (start + width)
    tl.store(row + start + column, sees.to(mask.dtype.element_ty), mask=column < width)
    if WHOLE:
        at = tl.arange(0, CHUNK)
        for chunk in range(tl.cdiv(start, CHUNK)):
            place = chunk * CHUNK + at
            tl.store(row + place, tl.full((CHUNK,), 1, mask.dtype.element_ty), mask=place < start)
