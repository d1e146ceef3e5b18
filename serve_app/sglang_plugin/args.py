"""DDTREE's options on SGLang's command line, and everything it refuses.

| option | meaning | default |
|---|---|---|
| --speculative-num-draft-tokens | rows per verify step: tree budget + 1 (the root) | 33 |
| --speculative-eagle-topk | candidates per depth that the tree may use; 1 gives DFLASH's chain | 8 |
| --speculative-dflash-block-size | the drafter's block; all but its first slot are drafted | the drafter's own |

SGLANG_DDTREE_COMMIT_IN_GRAPH=0 takes acceptance and KV compaction out of the captured verify graph;
SGLANG_DDTREE_SPINE_FIRST=1 puts the drafter's whole top-1 chain into every tree before anything else.

A refusal is a ValueError at start. What could give wrong tokens is refused here, not discovered later; what is merely
unproven is refused too.

What this module does not do: look at weights or devices (the worker refuses what only they show).
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT_WIDTH = 33
DEFAULT_TOPK = 8
# One lane per node in the build kernel, and parents packed in eight bits.
MAX_WIDTH = 128
MAX_TOPK = 32
MAX_BLOCK = 64
# Backends whose verify path reads a tree mask, also under CUDA graphs, for multi-head attention and for MLA.
MHA_BACKENDS = ("triton", "flashinfer")
MLA_BACKENDS = ("triton",)

# What no drafter of this family goes with, by the field of ServerArgs: drafts are made of the target's features of
# every token, kept at the slots of the token's own keys and values. SGLang's DFLASH starts with all of these.
NOT_WITH_DRAFTS = {
    "enable_two_batch_overlap": "splits the verify batch",
    "enable_pdmux": "computes prompts past the drafter, on other attention backends than the captured one",
    "enable_lmcache": "restores prefixes without what the drafter knows of them",
    "enable_flexkv": "restores prefixes without what the drafter knows of them",
    "radix_cache_backend": "may restore prefixes without what the drafter knows of them",
    "enable_prefill_cp": "leaves each rank a part of a prompt's features",
    "enable_prefill_context_parallel": "leaves each rank a part of a prompt's features",
    "enable_dsa_prefill_context_parallel": "leaves each rank a part of a prompt's features",
}


@dataclass(frozen=True)
class Options:
    """Widths of one deployment.

    Attributes:
        width: N, rows of a verify step, root included.
        topk: K, candidates per depth.
        block_size: rows of a draft forward.
        spine_first: whether the top-1 chain goes into the tree before the heaviest nodes.
    """

    width: int
    topk: int
    block_size: int
    spine_first: bool = False

    @property
    def budget(self) -> int:
        return self.width - 1

    @property
    def depth(self) -> int:
        """D, the deepest node: the drafter's depths, as far as the budget reaches."""
        return min(self.block_size - 1, self.budget)

    @property
    def path(self) -> int:
        """P, the longest accepted path with the root, which is the most tokens one step commits."""
        return self.depth + 1

    @property
    def slots(self) -> int:
        """KV slots one step may write per request: the drafter's block and the tree share them."""
        return max(self.width, self.block_size)


def options(server_args: Any) -> Options:
    """The options of resolved server arguments (a draft copy's widths are narrowed: do not pass one)."""
    return Options(
        width=int(server_args.speculative_num_draft_tokens),
        topk=int(server_args.speculative_eagle_topk),
        block_size=int(server_args.speculative_dflash_block_size),
        spine_first=os.environ.get("SGLANG_DDTREE_SPINE_FIRST", "0") != "0",
    )


def slots_per_step(server_args: Any) -> int:
    """`options(server_args).slots`, without the rest: the scheduler asks several times per step."""
    return max(int(server_args.speculative_num_draft_tokens), int(server_args.speculative_dflash_block_size))


def is_ddtree(server_args: Any) -> bool:
    """Whether these server arguments, or any stand-in with the field, select DDTREE."""
    return (getattr(server_args, "speculative_algorithm", None) or "").upper() == "DDTREE"


def is_dflash(server_args: Any) -> bool:
    """Likewise for SGLang's own DFLASH."""
    return (getattr(server_args, "speculative_algorithm", None) or "").upper() == "DFLASH"


def commit_in_graph() -> bool:
    return os.environ.get("SGLANG_DDTREE_COMMIT_IN_GRAPH", "1") != "0"


def early_defaults(server_args: Any) -> None:
    """Before SGLang resolves anything: its attention default is chosen ahead of the speculative handler, and knows
    neither the tree nor what can verify one."""
    if server_args.speculative_eagle_topk is None:
        server_args.speculative_eagle_topk = DEFAULT_TOPK
    split = (server_args.prefill_attention_backend, server_args.decode_attention_backend)
    if server_args.attention_backend is None and split == (None, None):
        server_args.attention_backend = "triton"


def validate_server_args(server_args: Any) -> None:
    """Refuse what cannot be combined. Raises ValueError with one line per reason."""
    reasons = [reason for wrong, reason in _conflicts(server_args) if wrong]
    if reasons:
        raise ValueError("DDTREE cannot start:\n- " + "\n- ".join(reasons))


def _conflicts(args: Any) -> list[tuple[bool, str]]:
    def on(field: str) -> bool:
        return bool(getattr(args, field, False))

    combined = [(on(field), f"{_flag(field)} {why}") for field, why in NOT_WITH_DRAFTS.items()]
    return [
        *combined,
        ((getattr(args, "attn_cp_size", 1) or 1) > 1, "--attn-cp-size leaves each rank a part of a prompt's features"),
        (not str(args.device).startswith("cuda"), f"device {args.device}: only CUDA devices have its kernels"),
        (not args.speculative_draft_model_path, "--speculative-draft-model-path is missing"),
        (args.pp_size != 1, f"--pp-size {args.pp_size}: pipeline parallelism is not supported"),
        (on("enable_dp_attention"), "--enable-dp-attention is not supported"),
        ((getattr(args, "dcp_size", 1) or 1) > 1, "decode context parallelism has no tree mask"),
        ((getattr(args, "disaggregation_mode", "null") or "null") != "null", "prefill/decode disaggregation"),
        (on("enable_lora"), "LoRA: the drafter's features would be the adapter's"),
        (on("enable_unified_memory"), "the unified memory pool renumbers KV slots"),
        (on("enable_hierarchical_cache"), "--enable-hierarchical-cache has not been tried with trees"),
        (on("enable_torch_compile"), "--enable-torch-compile has not been tried with trees"),
        (on("rl_on_policy_target"), "--rl-on-policy-target samples by another law"),
        (
            _decode_graphs(args) not in (None, "full", "disabled"),
            f"decode graphs of kind {_decode_graphs(args)} have not been tried with trees",
        ),
        (on("speculative_adaptive"), "--speculative-adaptive changes the verify width"),
        (args.speculative_draft_window_size is not None, "--speculative-draft-window-size is not supported"),
        (args.speculative_accept_threshold_single != 1.0, "acceptance is exact: --speculative-accept-threshold-single"),
        (args.speculative_accept_threshold_acc != 1.0, "acceptance is exact: --speculative-accept-threshold-acc"),
    ]


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _decode_graphs(args: Any) -> str | None:
    """The kind of graph that steps replay, None before SGLang has chosen."""
    config = getattr(args, "cuda_graph_config", None)
    backend = getattr(getattr(config, "decode", None), "backend", None)
    return None if backend is None else str(backend)


def resolve_server_args(server_args: Any) -> None:
    """Fill in widths and defaults, then check them against backends. Raises ValueError."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    if server_args.speculative_dflash_block_size is None:
        server_args.speculative_dflash_block_size = _drafter_block_size(server_args)
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = DEFAULT_WIDTH
    if server_args.speculative_eagle_topk is None:
        server_args.speculative_eagle_topk = DEFAULT_TOPK
    # Only generic sizing reads it: SGLang multiplies it with the top-k for chains that DDTREE does not have.
    server_args.speculative_num_steps = 1
    chosen = options(server_args)
    check_widths(chosen)
    view = resolved_view(server_args)
    prefill, decode = attention_backends_of(view)
    check_backends(prefill, decode, server_args.speculative_attention_mode, server_args.use_mla_backend())
    if server_args.speculative_draft_attention_backend is None:
        server_args.speculative_draft_attention_backend = decode
    if server_args.speculative_draft_attention_backend not in MHA_BACKENDS:
        raise ValueError(f"DDTREE's drafter runs on {' or '.join(MHA_BACKENDS)}: --speculative-draft-attention-backend")
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("DDTREE: mixed chunked prefill is off")
    logger.info("DDTREE: %s, budget %d, depth %d", chosen, chosen.budget, chosen.depth)


def check_widths(chosen: Options) -> None:
    """Raises ValueError unless a tree of these widths exists and fits the kernels."""
    for name, value, low, high in (
        ("--speculative-num-draft-tokens (budget + 1)", chosen.width, 2, MAX_WIDTH),
        ("--speculative-eagle-topk", chosen.topk, 1, MAX_TOPK),
        ("--speculative-dflash-block-size", chosen.block_size, 2, MAX_BLOCK),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, not in {low}..{high}")
    most = 0
    for level in range(1, chosen.depth + 1):
        most = min(most + chosen.topk**level, MAX_WIDTH)
    if chosen.budget > most:
        raise ValueError(
            f"a tree of depth {chosen.depth} with top-k {chosen.topk} has at most {most} nodes, "
            f"not --speculative-num-draft-tokens - 1 = {chosen.budget}"
        )


def check_backends(prefill: str | None, decode: str | None, mode: str, mla: bool) -> None:
    """Raises ValueError unless the backend that runs the verify step reads a tree mask.

    Args:
        prefill, decode: resolved attention backends. mode: --speculative-attention-mode. mla: latent attention.
    """
    allowed = MLA_BACKENDS if mla else MHA_BACKENDS
    kind = "MLA" if mla else "attention"
    if decode not in allowed:
        raise ValueError(f"DDTREE: {kind} backend {decode} does not read a tree mask; use {' or '.join(allowed)}")
    if prefill != decode and mode != "decode":
        raise ValueError(
            f"DDTREE: prefill backend {prefill} would run the verify step; set --speculative-attention-mode decode"
        )


def _drafter_block_size(server_args: Any) -> int:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    if block is None:
        raise ValueError("the drafter's config has no block size: set --speculative-dflash-block-size")
    return int(block)
