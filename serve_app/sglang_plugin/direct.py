"""The step's two replays without SGLang's preparation of each forward.

SGLang prepares a forward for replay from a ForwardBatch: objects, checks, slices and copies that are the same in every
step of a batch size. In steady state the step has written both attention plans (`plan`), so what is left of it is four
tensors per forward. Here they go where the captured graphs read them, through views that are made once per batch size.
What the graphs read is byte for byte what SGLang would have put there, and nothing else about the graphs changes.

A batch that does not qualify, or a server on which something watches or changes forwards, is prepared by SGLang; the
reason is counted.

What this module does not do: capture graphs, or decide what a step is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from serve_app.sglang_plugin.args import Options
from serve_app.sglang_plugin.plan import Planner
from serve_app.sglang_plugin.prepare import prepare_step
from serve_app.sglang_plugin.tree import TreeBuffers

SWITCH = "SGLANG_DDTREE_DIRECT_REPLAY"
# What SGLang copies for a replay here; a runner that copies more is not ours to feed.
_COPIED = {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"}
# Copied only for models that have them, filled only when ranks gather, or read by no captured kernel of these backends.
_IDLE = {"mrope_positions", "seq_lens_cpu", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}


class Preparation(StrEnum):
    """How a step's forwards were prepared: by the step itself, or by SGLang and why; the values are a label."""

    DIRECT = "direct"
    OFF = "switched_off"
    PLAN = "not_planned_in_step"
    GRAPHS = "not_in_graphs"  # a forward, or what belongs behind it, is not captured
    WATCHED = "watched_forwards"  # something of SGLang's wants to see every forward
    BATCH = "bs_exceeds_max"
    SAMPLING = "sampling"  # acceptance needs more than argmax
    LOGPROBS = "logprobs"


@dataclass(frozen=True)
class Views:
    """Where a batch of one size goes.

    Attributes:
        inputs: of the draft graph: ids, positions and slots [B, block] each; and the tree's slots [B, N].
        ids: [B · block], the same ids. embeds: [B · block, H], the draft graph's.
        rows: seq_lens and req_pool_indices of both graphs, [B] each, in this order; less what they share.
        tree: input ids, positions and slots of the verify graph, [B · N] each; `sources` are what they get.
        padding: what SGLang zeroes beyond the batch before the draft, and `lengths` what it fills with one.
        tree_padding: likewise before the verify.
        draft_key, verify_key: the graphs to replay. bucket: the captured batch size.
    """

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    ids: Tensor
    embeds: Tensor
    rows: list[Tensor]
    tree: list[Tensor]
    sources: list[Tensor]
    padding: list[Tensor]
    lengths: list[Tensor]
    tree_padding: list[Tensor]
    draft_key: Any
    verify_key: Any
    bucket: int


class DirectReplay:
    """The worker's two captured forwards.

    Args:
        draft_runner, target_runner: SGLang's ModelRunners, after capture. planner: theirs.
        trees: the worker's, which the draft graph fills. slots: int64 [capacity, N], the worker's.
        embedding: the target's input embeddings. mask_token: id of the drafter's mask.
        in_graphs: whether tree build and commit were captured with the forwards.
    """

    def __init__(
        self,
        draft_runner: Any,
        target_runner: Any,
        planner: Planner,
        chosen: Options,
        trees: TreeBuffers,
        slots: Tensor,
        embedding: Any,
        mask_token: int,
        in_graphs: bool,
    ) -> None:
        self._runners = (draft_runner, target_runner)
        self._graphs = tuple(runner.decode_cuda_graph_runner for runner in self._runners)
        self._planner, self._chosen, self._trees, self._slots = planner, chosen, trees, slots
        self._embedding, self._mask_token = embedding, mask_token
        self._lookup = _is_lookup(embedding)
        self._views: dict[int, Views] = {}
        self.refused = self._refused(in_graphs)

    def _refused(self, in_graphs: bool) -> Preparation | None:
        """Why no step of this server is replayed directly."""
        if os.environ.get(SWITCH) == "0":
            return Preparation.OFF
        if not self._planner.active:
            return Preparation.PLAN
        if not in_graphs or not all(_plain_graphs(graphs) for graphs in self._graphs):
            return Preparation.GRAPHS
        draft, verify = self._graphs
        if draft.capture_bs != verify.capture_bs:
            return Preparation.GRAPHS
        if _watched() or any(_watched_runner(runner) for runner in self._runners):
            return Preparation.WATCHED
        return None

    def preparation(self, batch: Any, size: int, by_argmax: bool) -> Preparation:
        """How to prepare the step of SGLang's ScheduleBatch `batch` of `size` requests. No GPU sync."""
        if self.refused is not None:
            return self.refused
        if not by_argmax:
            return Preparation.SAMPLING
        if batch.return_logprob:
            return Preparation.LOGPROBS
        if size > self._graphs[0].max_bs:
            return Preparation.BATCH
        # The scheduler installs its timers after the workers have captured.
        if any(runner.device_timer is not None for runner in self._runners):
            return Preparation.WATCHED
        return Preparation.DIRECT

    def replay(self, roots: Tensor, starts: Tensor, requests: Tensor) -> int:
        """Draft, build, verify, accept and commit B requests; the outcome is in the worker's commit buffers.

        Args:
            roots: int64 [B], last committed tokens. starts: int64 [B]: committed lengths. requests: int64 [B]: rows of
                the request table.
        Returns:
            The captured batch size that was replayed.
        """
        size = roots.shape[0]
        views = self._views.get(size)
        if views is None:
            views = self._views[size] = self._made(size)
        draft, verify = self._graphs
        target_runner = self._runners[1]
        table = target_runner.req_to_token_pool.req_to_token
        prepare_step(roots, starts, requests, table, self._mask_token, views.inputs, self._planner.plan_of(size))
        torch._foreach_copy_(views.rows, [starts, requests] * (len(views.rows) // 2))
        if views.padding:
            torch._foreach_zero_(views.padding)
            for lengths in views.lengths:
                lengths.fill_(draft.seq_len_fill_value)
        if self._lookup and self._embedding.weight.dtype == views.embeds.dtype:
            torch.index_select(self._embedding.weight, 0, views.ids, out=views.embeds)
        else:
            views.embeds.copy_(self._embedding(views.ids))
        draft.backend.replay(views.draft_key, None)
        # Draft and verify graph share the memory of inputs that are equally long, hence only now.
        torch._foreach_copy_(views.tree, views.sources)
        if views.tree_padding:
            torch._foreach_zero_(views.tree_padding)
        # As SGLang tells its scheduler: from here on the step does not read the request table.
        read_done = verify.device_module.Event()
        read_done.record()
        target_runner.war_fastpath_read_done_event = read_done
        verify.backend.replay(views.verify_key, None)
        for runner in self._runners:
            runner.forward_pass_id += 1
        return views.bucket

    def _made(self, size: int) -> Views:
        draft, verify = self._graphs
        bucket = draft._pad_to_bucket(size, draft.capture_bs)
        block, width = self._chosen.block_size, self._chosen.width
        ids, positions, slots, requests, lengths = _static(draft)
        tree_ids, tree_positions, tree_slots, tree_requests, tree_lengths = _static(verify)
        rows, padding, fills = [lengths[:size], requests[:size]], [], []
        shared = (lengths.data_ptr(), requests.data_ptr()) == (tree_lengths.data_ptr(), tree_requests.data_ptr())
        if not shared:
            rows += [tree_lengths[:size], tree_requests[:size]]
        if bucket > size:
            padding = [
                positions[size * block : bucket * block], slots[size * block : bucket * block],
                requests[size:bucket], tree_requests[size:bucket],
            ]  # fmt: skip
            fills = [lengths[size:bucket], tree_lengths[size:bucket]]
        end = size * width
        trees = self._trees.first(size)
        return Views(
            inputs=(
                ids[: size * block].view(size, block),
                positions[: size * block].view(size, block),
                slots[: size * block].view(size, block),
                self._slots[:size],
            ),
            ids=ids[: size * block],
            embeds=draft.buffers.input_embeds[: size * block],
            rows=rows,
            tree=[tree_ids[:end], tree_positions[:end], tree_slots[:end]],
            sources=[trees.tokens.view(-1), trees.positions.view(-1), self._slots[:size].view(-1)],
            padding=padding,
            lengths=fills,
            tree_padding=(
                [tree_positions[end : bucket * width], tree_slots[end : bucket * width]] if bucket > size else []
            ),
            draft_key=draft._make_graph_key(bucket),
            verify_key=verify._make_graph_key(bucket),
            bucket=bucket,
        )


def _static(graphs: Any) -> list[Tensor]:
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    return [graphs.buffer_registry.get_slot(name).buffer for name in names]


def _plain_graphs(graphs: Any) -> bool:
    """Whether the runner replays one whole CUDA graph per batch size, from the inputs that are known here."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

    if not isinstance(graphs, DecodeCudaGraphRunner) or not isinstance(graphs.backend, FullCudaGraphBackend):
        return False
    modes = (
        "disable_padding", "ragged_verify_mode", "enable_pdmux", "enable_two_batch_overlap", "require_mlp_sync",
        "is_encoder_decoder", "use_ngram_embedding", "record_nolora_graph",
    )  # fmt: skip
    if any(getattr(graphs, mode, False) for mode in modes) or graphs.pp_size > 1:
        return False
    return _COPIED <= set(graphs.buffer_registry.slot_names()) <= _COPIED | _IDLE


def _watched_runner(runner: Any) -> bool:
    """Whether `ModelRunner.forward` would do more than replay."""
    watchers = ("msprobe_debugger", "canary_manager", "eplb_manager", "hisparse_coordinator")
    changed = runner.enable_elastic_ep or runner.model_config.model_is_mrope
    return bool(changed) or any(getattr(runner, name) is not None for name in watchers)


def _watched() -> bool:
    """Likewise, process-wide."""
    from sglang.srt.eplb.expert_distribution import (
        _ExpertDistributionRecorderReal,
        get_global_expert_distribution_recorder,
    )
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.model_executor import model_runner as module

    return bool(
        isinstance(get_global_expert_distribution_recorder(), _ExpertDistributionRecorderReal)
        or module.get_global_experts_capturer() is not None
        or module.get_global_indexer_capturer() is not None
        or module.dumper.may_enable
        or get_moe_a2a_backend().is_deepep()
    )


def _is_lookup(embedding: Any) -> bool:
    """Whether `embedding` looks up rows of its weight and does nothing else; it is called otherwise."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return (
        type(embedding) is VocabParallelEmbedding
        and embedding.tp_size == 1
        and type(embedding.quant_method) is UnquantizedEmbeddingMethod
    )
