"""DDTREE's step in SGLang's scheduler: draft a block, build trees, verify them, accept, commit.

Two graph replays and a handful of launches between them. The draft graph ends with the drafter's top-k and the tree
build, the verify graph with acceptance, KV compaction and the drafter's new context (for batches that only need argmax;
others commit after it, by the same functions). Nothing in the step waits for the GPU.

Order of memory: the request table is read once, before the draft. SGLang lets the scheduler rewrite it as soon as the
verify graph's inputs are staged, so everything after uses the slots gathered then.

What this module does not do: plan attention, capture graphs (SGLang's runners), or schedule.
"""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    compute_position,
)
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils import get_available_gpu_memory
from torch import Tensor

from serve_app.sglang_plugin import metrics
from serve_app.sglang_plugin.args import commit_in_graph, options
from serve_app.sglang_plugin.commit import CommitBuffers, KVMover, Outcome, accept
from serve_app.sglang_plugin.direct import DirectReplay, Preparation
from serve_app.sglang_plugin.graph import Fallback, state_bytes
from serve_app.sglang_plugin.inputs import DDTreeDraftInput, DDTreeVerifyInput, StepResult, verify_input
from serve_app.sglang_plugin.plan import Planner
from serve_app.sglang_plugin.plugin import PluginError, assert_installed
from serve_app.sglang_plugin.prepare import prepare_step
from serve_app.sglang_plugin.sampling import sample_nodes
from serve_app.sglang_plugin.topk import topk_logprobs
from serve_app.sglang_plugin.tree import TreeBuffers, build_trees, write_mask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """The part of the target's output head that this rank owns: weight [V', H] and the token id of its first row."""

    weight: Tensor
    first_id: int


class DDTreeWorker(DFlashWorkerV2):
    """SGLang constructs it in the scheduler, on a draft-only copy of the server arguments."""

    _fused_kv_helper: Any
    _mover: KVMover
    _planner: Planner

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        assert_installed()
        self.chosen = options(server_args)
        # The drafter sees one block and no tree; this copy of the arguments is its own.
        server_args.override(
            "ddtree.draft_widths", speculative_num_draft_tokens=self.chosen.block_size, speculative_eagle_topk=1
        )
        super().__init__(server_args, gpu_id, ps, nccl_port, target_worker)
        _refuse_model(target_worker.model_runner)
        self._head = _head(target_worker.model_runner.model)
        self._tail_in_draft_graph = False
        self._tail_in_verify_graph = False
        self._commit_flag = True
        # Triton's kernel for deterministic inference reads the cells of the committed prefix too.
        self._whole_mask = bool(server_args.enable_deterministic_inference)
        self._graph_kv_helper: Any = None
        enabled = server_args.enable_metrics and ps.tp_rank == 0
        metrics.start(server_args.served_model_name or server_args.model_path, self.chosen, enabled)

    # -- start-up ----------------------------------------------------------------------------------------------------

    def init_attention_backends(self) -> None:
        """The last call before the target's graphs are captured: allocate what they will read, and join them."""
        super().init_attention_backends()
        runner = self.model_runner
        decode = get_exec().graph.cuda_graph_config.decode
        capacity = max(int(runner.max_running_requests), *(decode.bs or [1]))
        self._trees = TreeBuffers.allocate(capacity, self.chosen.width, self.device)
        self._commit = CommitBuffers.allocate(capacity, self.chosen.width, self.chosen.path, self.device)
        self._slots = torch.zeros((capacity, self.chosen.width), dtype=torch.int64, device=self.device)
        self._offsets = torch.arange(self.chosen.path, device=self.device)
        self._mover = KVMover(_caches(runner.token_to_kv_pool))
        self._graph_kv_helper = self._private_kv_helper(capacity * self.chosen.path)
        if commit_in_graph():
            runner.capture_tail_hooks.append(self._capture_commit)

    def init_cuda_graphs(self) -> None:
        """Capture the draft graph; the target's is captured already."""
        capture = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        if capture and get_available_gpu_memory(self.device, self.gpu_id) < 1.0:
            capture = False
            logger.warning("DDTREE: less than 1 GB is free, the draft graph is not captured")
        if capture and self._head is not None:
            self.draft_model_runner.capture_tail_hooks.append(self._capture_draft_tail)
        self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=capture)
        self._planner = Planner(self.draft_model_runner, self.model_runner)
        self._direct = self._direct_replay()
        sizes = {name: f"{size / 2**20:.1f} MiB" for name, size in state_bytes(self.model_runner).items()}
        who = "the step" if self._planner.active else "SGLang"
        logger.info("DDTREE: budget %d, attention planned by %s, graph state %s", self.chosen.budget, who, sizes)
        logger.info("DDTREE: steps are prepared by %s", self._direct.refused or "the step itself")

    def _direct_replay(self) -> DirectReplay:
        runner = self.model_runner
        captured = self._tail_in_draft_graph and self._tail_in_verify_graph
        return DirectReplay(
            self.draft_model_runner,
            runner,
            self._planner,
            self.chosen,
            self._trees,
            self._slots,
            embedding=runner.model.get_input_embeddings(),
            mask_token=int(self._mask_token_id),
            in_graphs=captured and self._static_mask(runner.decode_cuda_graph_runner.max_bs) is not None,
        )

    def _private_kv_helper(self, rows: int) -> Any:
        """DFLASH's fused writer with scratch memory of its own: the shared one reallocates it when a prompt needs more,
        while captured graphs would go on writing into the old one."""
        if self._fused_kv_helper is None:
            return None
        helper = copy.copy(self._fused_kv_helper)
        helper._workspace_capacity = 0
        helper._ensure_workspace(rows, helper.flat_kv_weight_t.dtype)
        return helper

    def _capture_draft_tail(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        self._draft_tail(out.hidden_states, forward_batch.input_ids, forward_batch.seq_lens)
        self._tail_in_draft_graph = True

    def _capture_commit(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        batch = forward_batch.batch_size
        self._commit.posterior[:batch].copy_(out.next_token_logits.argmax(-1).view(batch, -1))
        self._commit_step(out.hidden_states, forward_batch.seq_lens, forward_batch.out_cache_loc, in_graph=True)
        self._tail_in_verify_graph = True

    # -- the step ----------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """One scheduler step: a prefill, or draft → build → verify → accept → commit for every running request."""
        began = time.perf_counter()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = self._prefill(batch, on_publish)
            metrics.phase("prefill", time.perf_counter() - began)
            return result
        if batch.forward_mode.is_idle():
            raise PluginError("DDTREE has no idle steps: data-parallel attention is refused at start")
        if batch.seq_lens.is_cuda:  # made on the scheduler's stream
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        size = len(batch.seq_lens)
        greedy = self._commits_by_argmax(batch)
        self._set_commit_flag(greedy)
        preparation = self._direct.preparation(batch, size, greedy)
        metrics.preparation(preparation)
        if preparation is Preparation.DIRECT:
            return self._replayed_step(batch, on_publish, began)
        trees = self._trees.first(size)
        starts, slots = batch.seq_lens, self._slots[:size]
        self._draft(batch, slots)
        drafted = time.perf_counter()
        grammar_tree = (
            GrammarTree.from_device(trees.next_token, trees.next_sibling, trees.tokens) if batch.has_grammar else None
        )
        out, replayed, forward_batch = self._verify(batch, trees, slots)
        self._planner.end()
        verified = time.perf_counter()
        if not (greedy and replayed and self._tail_in_verify_graph):
            self._commit_flag_off_graph(replayed)
            logits = self._adjusted_logits(batch, out.next_token_logits, grammar_tree, grammar_barrier)
            self._posterior(batch, logits, trees.positions.reshape(-1))
            self._commit_step(out.hidden_states, starts, slots, in_graph=False)
        outcome = self._commit.outcome(size)
        if on_publish is not None:
            on_publish(outcome.new_seq_lens)
        if batch.return_logprob:
            posterior = self._commit.posterior[:size].reshape(-1)
            compute_spec_v2_logprobs(batch, out, posterior, self._commit.rows[:size], self.chosen.depth)
        result = self._result(out, outcome, replayed, forward_batch)
        for phase, seconds in (("draft", drafted - began), ("verify", verified - drafted)):
            metrics.phase(phase, seconds)
        metrics.phase("accept", time.perf_counter() - verified)
        return result

    def _replayed_step(self, batch: Any, on_publish: Any, began: float) -> GenerationBatchResult:
        """The step when nothing of it is left to do outside the graphs."""
        size = len(batch.seq_lens)
        bucket = self._direct.replay(batch.spec_info.bonus_tokens, batch.seq_lens, batch.req_pool_indices)
        for role in ("draft", "target"):
            metrics.graph_replay(role, bucket - size, bucket)
        replayed = time.perf_counter()
        outcome = self._commit.outcome(size)
        if on_publish is not None:
            on_publish(outcome.new_seq_lens)
        result = StepResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),  # the graph's own, and nobody asked for them
            can_run_cuda_graph=True,
            flat=outcome.flat,
            **self._told(outcome),
        )
        metrics.phase("verify", replayed - began)
        metrics.phase("accept", time.perf_counter() - replayed)
        return result

    def _result(self, out: Any, outcome: Outcome, replayed: bool, forward_batch: ForwardBatch) -> GenerationBatchResult:
        out.hidden_states = None  # consumed; the scheduler would copy them to the host
        return GenerationBatchResult(
            logits_output=out,
            can_run_cuda_graph=replayed,
            extra_keep_alive_refs=[forward_batch],
            **self._told(outcome),
        )

    def _told(self, outcome: Outcome) -> dict[str, Any]:
        """What every step's result says of its outcome."""
        return {
            "next_token_ids": outcome.tokens,
            "accept_lens": outcome.lengths,
            "next_draft_input": DDTreeDraftInput.of(outcome.bonus, outcome.new_seq_lens),
            "speculative_num_draft_tokens": self.chosen.path,
            "new_seq_lens": outcome.new_seq_lens,
        }

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """Prompt tokens through the target; their features become the drafter's context at the same slots."""
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        out = result.logits_output
        device = result.next_token_ids.device
        # From pinned memory, so that nothing waits for the device, which may still be busy with the step before.
        lengths = torch.tensor(
            [batch.prefix_lens, batch.extend_lens], dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        prefix, extend = lengths.to(device, non_blocking=True)
        backend = self.model_runner.server_args.attention_backend
        positions, _ = compute_position(backend, prefix, extend, sum(batch.extend_lens))
        # Before the scheduler may insert the prompt into the prefix cache, which shares these slots with the drafter.
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=out.hidden_states, cache_loc=batch.out_cache_loc, positions=positions
        )
        out.hidden_states = None
        result.next_draft_input = DDTreeDraftInput.of(result.next_token_ids.long(), batch.seq_lens.long())
        return result

    def _draft(self, batch: Any, slots: Tensor) -> None:
        """Fill `slots` and the tree buffers: one forward of the drafter over [root, mask × (block - 1)]."""
        size = len(batch.seq_lens)
        draft_input = batch.spec_info
        self._ensure_draft_block_buffers(size)
        block_ids, positions = self._draft_block_ids_buf[:size], self._draft_block_positions_buf[:size]
        block_slots = self._draft_verify_out_cache_loc_buf[:size]
        prepare_step(
            draft_input.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            self._mask_token_id,
            (block_ids, positions, block_slots, slots),
            self._planner.begin(size),
        )
        embedded = self.target_worker.model_runner.model.get_input_embeddings()(block_ids)
        lengths, total = self._host_lengths(batch, draft_input)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=block_ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=block_slots.view(-1),
            seq_lens_sum=total,
            seq_lens_cpu=lengths,
            positions=positions.view(-1),
            input_embeds=embedded.view(-1, embedded.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            drafted = self.draft_model_runner.forward(forward_batch)
            if not (drafted.can_run_graph and self._tail_in_draft_graph):
                if drafted.can_run_graph:
                    metrics.graph_fallback("draft", Fallback.DRAFT_HEAD)
                self._draft_tail(drafted.logits_output.hidden_states, block_ids.view(-1), batch.seq_lens)

    def _host_lengths(self, batch: Any, draft_input: Any) -> tuple[Tensor, int]:
        """Bounds of the drafter's context for backends that plan on the host: (int32 [B] on the CPU, their sum)."""
        lengths = self._draft_seq_lens_cpu_buf[: len(batch.seq_lens)]
        if batch.seq_lens_cpu is not None:
            lengths.copy_(batch.seq_lens_cpu).add_(self.block_size)
            return lengths, int(lengths.sum())
        lengths.copy_(draft_input.reserved_seq_lens_cpu)
        return lengths, int(draft_input.reserved_seq_lens_sum)

    def _draft_tail(self, hidden: Tensor, block_ids: Tensor, starts: Tensor) -> None:
        """From the drafter's hidden states [B·block, H] to trees and their mask; captured with the draft graph."""
        chosen = self.chosen
        size = starts.shape[0]
        rows = hidden.view(size, chosen.block_size, -1)[:, 1 : chosen.depth + 1].reshape(size * chosen.depth, -1)
        tp_group = get_tp_group()
        logits = torch.matmul(rows.to(self._head.weight.dtype), self._head.weight.T)
        tokens, logps = topk_logprobs(
            logits, chosen.topk, first_id=self._head.first_id, tp_group=tp_group if tp_group.world_size > 1 else None
        )
        shape = (size, chosen.depth, chosen.topk)
        trees = self._trees.first(size)
        roots = block_ids.view(size, chosen.block_size)[:, 0]
        build_trees(trees, roots, starts, tokens.view(shape), logps.view(shape), chosen)
        mask = self._static_mask(size)
        if mask is not None:
            write_mask(mask, trees.parents, starts, whole=self._whole_mask)

    def _static_mask(self, size: int) -> Tensor | None:
        """The mask that the verify graph reads, where the attention backend owns one that fits the batch."""
        owned = self.model_runner.attn_backend.verify_mask
        return owned.buffer if owned is not None and owned.fits(size) else None

    def _verify(self, batch: Any, trees: TreeBuffers, slots: Tensor) -> tuple[Any, bool, ForwardBatch]:
        size = trees.tokens.shape[0]
        mask = self._static_mask(size)
        if mask is None:
            mask = self._fresh_mask(batch, size)
            write_mask(mask, trees.parents, batch.seq_lens)
        tree = verify_input(self.chosen, mask, trees.tokens.reshape(-1), trees.positions.reshape(-1), trees.links)
        batch.out_cache_loc = slots.reshape(-1)
        done, forward_batch = self._target_forward(batch, tree)
        if done.logits_output.hidden_states is None:
            raise PluginError("the target returned no features: it has no layers to capture for the drafter")
        return done.logits_output, bool(done.can_run_cuda_graph), forward_batch

    def _target_forward(self, batch: Any, tree: DDTreeVerifyInput) -> tuple[GenerationBatchResult, ForwardBatch]:
        forward_batch = tree.prepare_for_verify(batch, self.target_worker)
        done = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        return done, forward_batch

    def _fresh_mask(self, batch: Any, size: int) -> Tensor:
        """All-visible mask of this step, of the exact size where the host knows it and a bound of it where not."""
        known = batch.seq_lens_sum if batch.seq_lens_cpu is not None else batch.spec_info.reserved_seq_lens_sum
        cells = self.chosen.width * (int(known) + self.chosen.width * size)
        return torch.ones(cells, dtype=torch.bool, device=self.device)

    def _commits_by_argmax(self, batch: Any) -> bool:
        info = batch.sampling_info
        return bool(
            info.is_all_greedy
            and not batch.has_grammar
            and info.logit_bias is None
            and not info.has_custom_logit_processor
        )

    def _set_commit_flag(self, wanted: bool) -> None:
        """Whether the verify graph's own commit takes effect in the coming replay; a launch only when it changes."""
        if self._tail_in_verify_graph and wanted != self._commit_flag:
            self._commit.enabled.fill_(int(wanted))
            self._commit_flag = wanted

    def _commit_flag_off_graph(self, replayed: bool) -> None:
        if replayed and self._tail_in_verify_graph and self._commit_flag:
            raise PluginError("the verify graph committed a batch that commits after it")

    def _adjusted_logits(self, batch: Any, logits: Tensor, tree: GrammarTree | None, barrier: Any) -> Tensor:
        mask = None
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=logits.device, barrier=barrier
            )
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits, sampling_info=batch.sampling_info, draft_token_num=self.chosen.width
        )
        if mask is not None:
            mask.apply(logits)
        return logits

    def _posterior(self, batch: Any, logits: Tensor, positions: Tensor) -> None:
        width = self.chosen.width
        backend = get_exec().kernel.sampling_backend
        sampled = sample_nodes(logits, batch.sampling_info, width, positions, backend=backend)
        tp_group = get_tp_group()
        if tp_group.world_size > 1 and not batch.sampling_info.is_all_greedy:
            tp_group.broadcast(sampled, src=0)
        self._commit.posterior[: len(batch.seq_lens)].copy_(sampled.view(-1, width))

    def _commit_step(self, features: Tensor, starts: Tensor, slots: Tensor, *, in_graph: bool) -> None:
        """Accept by the posterior, compact the KV cache, and give the drafter the accepted path's features.

        Args:
            features: [B·N, F]. starts: int [B]. slots: int64 [B·N] or [B, N], the step's own.
        """
        size = starts.shape[0]
        accept(self._commit, self._trees.first(size), starts, slots, in_graph=in_graph)
        self._mover.move(self._commit, size)
        rows, target = self._commit.rows[:size].view(-1), self._commit.target[:size]
        shared = self._fused_kv_helper
        if in_graph:
            self._fused_kv_helper = self._graph_kv_helper
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=features.index_select(0, rows),
            cache_loc=target.view(-1),
            cache_loc_2d=target,
            positions=(starts[:, None] + self._offsets).view(-1),
            commit_lens=self._commit.lengths[:size],
        )
        if in_graph:
            self._fused_kv_helper = shared


def _refuse_model(runner: Any) -> None:
    """Raises PluginError for targets whose state a tree cannot branch or a compaction cannot move."""
    if mambaish_config(runner.model_config) is not None:
        raise PluginError("DDTREE: hybrid models keep one recurrent state per sequence, not one per tree node")
    if runner.is_hybrid_swa or (runner.sliding_window_size or 0) > 0:
        # SGLang's kernels measure the window in rows, and a tree's rows are not positions; the pool aside.
        raise PluginError("DDTREE: models with sliding-window attention are not supported")


def _head(model: Any) -> Head:
    """Raises PluginError unless the target's output head can be multiplied with as it is."""
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not torch.is_floating_point(weight):
        raise PluginError("DDTREE drafts with the target's output head, which must be an unquantised weight")
    shard = getattr(head, "shard_indices", None)
    if shard is None:
        if get_tp_group().world_size > 1:
            raise PluginError("DDTREE: the output head does not say which part of the vocabulary this rank owns")
        return Head(weight, 0)
    if int(shard.num_added_elements):
        raise PluginError("DDTREE: an output head with added vocabulary is not supported")
    return Head(weight[: int(shard.num_org_elements)], int(shard.org_vocab_start_index))


def _caches(pool: Any) -> list[Tensor]:
    """Every layer's cache tensors, one row per slot. Raises PluginError for layouts that have no such rows."""
    if type(pool) is MHATokenToKVPool and not pool.use_hnd and not pool.is_quantized_kv_cache:
        return [*pool.k_buffer, *pool.v_buffer]
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    raise PluginError(f"DDTREE cannot compact a {type(pool).__name__}")
