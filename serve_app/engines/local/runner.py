"""Runs the two models over the slot caches: prefill, draft, verify, commit. Every forward goes through a graph runner.

Host lists come in, device tensors go out; nothing here waits for the device except compaction.

What this module does not do: schedule, build trees, sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.ddtree.accept import Accepted
from serve_app.ddtree.kv import compaction_moves
from serve_app.ddtree.mask import ancestor_mask, positions
from serve_app.ddtree.tree import DraftTree
from serve_app.engines.local.attention import Window, open_window
from serve_app.engines.local.drafter import Drafter
from serve_app.engines.local.kv_cache import KVCache
from serve_app.engines.local.layers import Shape
from serve_app.engines.local.sampler import topk_rows
from serve_app.engines.local.target import Target
from serve_app.graphs import FieldSpec, ForwardBatch, GraphRunner, Role, StaticBuffers

# Extents are rounded up, so that successive steps of an eager CPU meet the same shapes.
_EXTENT_STEP = 64
# Prompts too: a CPU's kernels are made and kept per shape, some megabytes for each length of prompt. Padding rows are
# all but free, as the tile unit works on 16 at a time.
_PREFILL_STEP = 16


class Pending(NamedTuple):
    """Features of one request's last committed tokens, [b, F], of which the first `length` rows count."""

    features: Tensor | None
    length: int


class Verified(NamedTuple):
    """Target logits [B, N, V] and features [B, N, F] of a verify step."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class GraphOptions:
    """What the graphs of both models share.

    Attributes:
        batch_sizes: to capture. enabled: whether to. on_replay, on_fallback, on_capture: see `GraphRunner`.
    """

    batch_sizes: Sequence[int]
    enabled: bool
    on_replay: Callable[[str, int, int], None]
    on_fallback: Callable[[str, str], None]
    on_capture: Callable[[str, int, float, int], None] = lambda role, graphs, seconds, reserved: None

    def runner(
        self,
        role: Role,
        forward: Callable[[StaticBuffers, int], Any],
        widths: Sequence[int],
        fields: dict[str, FieldSpec],
        device: torch.device,
    ) -> GraphRunner:
        return GraphRunner(
            forward,
            device=device,
            batch_sizes=self.batch_sizes,
            widths=widths,
            fields=fields,
            role=role,
            enabled=self.enabled,
            on_replay=self.on_replay,
            on_fallback=self.on_fallback,
            on_capture=self.on_capture,
        )


class ModelRunner:
    """Both models, their caches and their graphs.

    Args:
        slots: KV slots, the probe's included. capacity: positions per slot, context plus margin.
        top_k: candidates per depth that a draft returns.
        widths, draft_widths: rows per request of verify steps and of drafts to capture.

    Attributes:
        eager_forwards: forwards so far that no graph served.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        slots: int,
        capacity: int,
        top_k: int,
        widths: Sequence[int],
        draft_widths: Sequence[int],
        graphs: GraphOptions,
    ) -> None:
        self.eager_forwards = 0
        graphs = replace(graphs, on_fallback=partial(self._fell_back, graphs.on_fallback))
        self.target, self.drafter, self._top_k = target, drafter, top_k
        self._device, self._capacity = target.device, capacity
        self._cache = self._new_cache(slots, target.shape)
        self._scratch = self._cache.scratch * capacity
        self._target_graphs = graphs.runner("target", self._captured_target, widths, self._fields(), self._device)
        if drafter is None:
            return
        spec = drafter.spec
        self._draft_cache = self._new_cache(slots, drafter.shape)
        self._no_features = torch.zeros(
            spec.block_size, len(spec.feature_layers) * drafter.shape.hidden, device=self._device, dtype=target.dtype
        )
        fields = self._fields()
        # Up to a whole block of features is committed at once, however short the block that is drafted next.
        fields["features"] = FieldSpec(tuple(self._no_features.shape), target.dtype)
        fields["out_cache_loc"] = FieldSpec((spec.block_size,), fill=self._scratch)
        del fields["tree_mask"]
        self._draft_graphs = graphs.runner("draft", self._captured_draft, draft_widths, fields, self._device)

    def _fell_back(self, tell: Callable[[str, str], None], role: str, reason: str) -> None:
        self.eager_forwards += 1
        tell(role, reason)

    def _new_cache(self, slots: int, shape: Shape) -> KVCache:
        sizes = (shape.layers, shape.kv_heads, shape.head_dim)
        return KVCache(slots, self._capacity, *sizes, self._device, self.target.dtype)

    def _fields(self) -> dict[str, FieldSpec]:
        """The target's. A padding row computes over the scratch slot, where it sees one finite position."""
        return {
            "input_ids": FieldSpec(("W",)),
            "positions": FieldSpec(("W",)),
            "slots": FieldSpec((), fill=self._cache.scratch),
            "out_cache_loc": FieldSpec(("W",), fill=self._scratch),
            "seq_lens": FieldSpec(()),
            "tree_mask": FieldSpec(("W", "W"), torch.bool, True),
        }

    def capture(self) -> None:
        """Capture graphs where the device has them."""
        self._target_graphs.capture()
        if self.drafter is not None:
            self._draft_graphs.capture()

    def release(self) -> None:
        """Drop graphs; the models and caches go with the object."""
        self._target_graphs.release()
        if self.drafter is not None:
            self._draft_graphs.release()

    # -- prefill ---------------------------------------------------------------------------------------------------

    def prefill(self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Compute prompt pieces and append the drafter's context for them.

        Args:
            slots, starts: per request, its slot and how many of its tokens are committed. tokens: the pieces.
        Returns:
            Logits [B, V] of each piece's last token.
        """
        lengths = [len(piece) for piece in tokens]
        width = -(-max(lengths) // _PREFILL_STEP) * _PREFILL_STEP
        ids = self._ints([[*piece, *(0,) * (width - len(piece))] for piece in tokens])
        columns = torch.arange(width, device=self._device)
        starts_, lengths_ = self._ints(starts), self._ints(lengths)
        real = columns < lengths_[:, None]
        places = torch.where(real, starts_[:, None] + columns, 0)
        own = torch.where(real, self._ints(slots)[:, None] * self._capacity + places, self._scratch)
        batch = ForwardBatch(
            "prefill",
            len(slots),
            width,
            input_ids=ids,
            positions=places,
            slots=self._ints(slots),
            out_cache_loc=own,
            seq_lens=starts_,
            tree_mask=torch.ones(width, width, dtype=torch.bool, device=self._device).tril().expand(len(slots), -1, -1),
            longest=max(starts),
        )
        hidden, features = self._target_graphs.run(batch, lambda batch: self._hidden(batch, list(slots)))
        if self.drafter is not None:
            self.drafter.append_context(features.flatten(0, 1), places.flatten(), own.flatten(), self._draft_cache)
        last: Tensor = hidden[torch.arange(len(slots), device=self._device), lengths_ - 1]
        return self.target.logits(last)

    # -- verify ----------------------------------------------------------------------------------------------------

    def verify(self, slots: Sequence[int], starts: Sequence[int], tree: DraftTree) -> Verified:
        """One target forward over the trees, whose nodes are written behind each request's committed tokens."""
        starts_ = self._ints(starts)
        batch = ForwardBatch(
            "verify" if tree.width > 1 else "decode",
            len(slots),
            tree.width,
            input_ids=tree.tokens,
            positions=positions(starts_, tree.depths),
            slots=self._ints(slots),
            out_cache_loc=self._locations(slots, starts, tree.width),
            seq_lens=starts_,
            tree_mask=ancestor_mask(tree.parents),
            longest=max(starts),
        )
        return Verified(*self._target_graphs.run(batch, lambda batch: self._target_forward(batch, list(slots))))

    def commit(self, slots: Sequence[int], starts: Sequence[int], accepted: Accepted) -> None:
        """Move the accepted nodes' K/V to the front of each request's new positions."""
        if accepted.indices.shape[1] == 1:  # roots alone lie where they belong
            return
        rows, source, target = compaction_moves(self._ints(starts), accepted)
        base = self._ints(slots)[rows] * self._capacity
        self._cache.move(base + source, base + target)

    # -- draft -----------------------------------------------------------------------------------------------------

    def draft(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        roots: Sequence[int],
        pending: Sequence[Pending],
        block: int,
    ) -> tuple[Tensor, Tensor]:
        """Append pending context, then draft one block per request.

        Args:
            block: root and masks, at most the drafter's own block size.
        Returns:
            tokens int64 and log-probs float32 [B, block − 1, top_k], by depth, the likeliest first.
        """
        assert self.drafter is not None
        spec = self.drafter.spec
        starts_, counts = self._ints(starts), self._ints([item.length for item in pending])
        rows = torch.arange(spec.block_size, device=self._device)
        own = (self._ints(slots) * self._capacity + starts_ - counts)[:, None] + rows
        batch = ForwardBatch(
            "draft",
            len(slots),
            block,
            input_ids=self._ints([[root, *(spec.mask_token,) * (block - 1)] for root in roots]),
            positions=starts_[:, None] + rows[:block],
            slots=self._ints(slots),
            # Where the features go, not the block: that one follows from slots and positions.
            out_cache_loc=torch.where(rows < counts[:, None], own, self._scratch),
            seq_lens=starts_,
            features=torch.stack([self._no_features if item.features is None else item.features for item in pending]),
            longest=max(starts),
        )
        drafted: tuple[Tensor, Tensor] = self._draft_graphs.run(
            batch, lambda batch: self._draft_forward(batch, list(slots))
        )
        return drafted

    # -- forwards over a batch -------------------------------------------------------------------------------------

    def _window(self, batch: ForwardBatch, slots: list[int] | None, groups: int, dtype: torch.dtype) -> Window:
        """`slots` on the host allow a cheaper window; inside a graph they are None and the extent is the whole slot."""
        assert batch.slots is not None and batch.seq_lens is not None and batch.tree_mask is not None
        extent, which = self._capacity, batch.slots
        if slots is not None and batch.longest is not None:
            needed = -(-(batch.longest + batch.width) // _EXTENT_STEP) * _EXTENT_STEP
            extent = min(needed, self._capacity)
            if slots == list(range(slots[0], slots[0] + len(slots))):
                return open_window(
                    slice(slots[0], slots[0] + len(slots)), batch.seq_lens, batch.tree_mask, extent, groups, dtype
                )
        return open_window(which, batch.seq_lens, batch.tree_mask, extent, groups, dtype)

    def _hidden(self, batch: ForwardBatch, slots: list[int] | None) -> tuple[Tensor, Tensor]:
        assert batch.input_ids is not None and batch.positions is not None and batch.out_cache_loc is not None
        window = self._window(batch, slots, self.target.shape.groups, self.target.dtype)
        return self.target.forward(batch.input_ids, batch.positions, batch.out_cache_loc.flatten(), self._cache, window)

    def _target_forward(self, batch: ForwardBatch, slots: list[int] | None = None) -> tuple[Tensor, Tensor]:
        hidden, features = self._hidden(batch, slots)
        return self.target.logits(hidden), features

    def _captured_target(self, buffers: StaticBuffers, rows: int) -> tuple[Tensor, Tensor]:
        return self._target_forward(buffers.as_batch(rows, "verify"))

    def _captured_draft(self, buffers: StaticBuffers, rows: int) -> tuple[Tensor, Tensor]:
        return self._draft_forward(buffers.as_batch(rows, "draft"))

    def _draft_forward(self, batch: ForwardBatch, slots: list[int] | None = None) -> tuple[Tensor, Tensor]:
        assert self.drafter is not None
        assert batch.out_cache_loc is not None and batch.features is not None and batch.positions is not None
        assert batch.input_ids is not None and batch.slots is not None
        where = batch.out_cache_loc.flatten()
        self.drafter.append_context(batch.features.flatten(0, 1), where % self._capacity, where, self._draft_cache)
        size, block = batch.input_ids.shape
        batch.tree_mask = torch.ones(size, block, block, dtype=torch.bool, device=self._device)
        window = self._window(batch, slots, self.drafter.shape.groups, self.target.dtype)
        locations = (batch.slots[:, None] * self._capacity + batch.positions).flatten()
        embedded = F.embedding(batch.input_ids, self.target.embedding)
        hidden = self.drafter.forward(embedded, batch.positions, locations, self._draft_cache, window)
        logits = self.target.logits(hidden).float()
        values, tokens = topk_rows(logits, self._top_k)
        return tokens, values - logits.logsumexp(-1, keepdim=True)

    # -- small tensors ---------------------------------------------------------------------------------------------

    def _locations(self, slots: Sequence[int], starts: Sequence[int], width: int) -> Tensor:
        first = self._ints([slot * self._capacity + start for slot, start in zip(slots, starts, strict=True)])
        return first[:, None] + torch.arange(width, device=self._device)

    def _ints(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
