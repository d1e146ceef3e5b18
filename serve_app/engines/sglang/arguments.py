"""From the configuration to SGLang's ServerArgs: every key of ours, then `sglang.server_args`, checked by name.

What this module does not do: import SGLang, or check values that it checks itself when the arguments are resolved.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from serve_app.config import Config
from serve_app.errors import ConfigError
from serve_app.sglang_plugin.args import NOT_WITH_DRAFTS

# Fields of ServerArgs that the configuration decides, by the key that does.
DECIDED = {
    "model_path": "model.source",
    "served_model_name": "model.id",
    "dtype": "model.dtype",
    "device": "model.device",
    "context_length": "model.context_length",
    "max_running_requests": "engine.max_running",
    "max_queued_requests": "engine.max_queued",
    "disable_cuda_graph": "engine.cuda_graphs",
    "tp_size": "sglang.tp_size",
    "attention_backend": "sglang.attention_backend",
    "page_size": "sglang.page_size",
    "mem_fraction_static": "sglang.mem_fraction_static",
    "tool_call_parser": "sglang.tool_call_parser",
    "reasoning_parser": "sglang.reasoning_parser",
    "speculative_algorithm": "speculation.method",
    "speculative_draft_model_path": "model.drafter",
    "speculative_num_draft_tokens": "speculation.budget",
    "speculative_eagle_topk": "speculation.top_k",
}
# Full prefill graphs: new tokens of a batch, and its requests at most. SGLang replays none that is less than half full,
# and prompts whose beginning is cached may have one new token. Longer ones keep the device busy without a graph.
FULL_PREFILL_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FULL_PREFILL_REQUESTS = 64
# What they decide: one of these said otherwise would leave the others without the graphs that they are for.
DECIDED_BY_FULL_PREFILL = dict.fromkeys(
    (
        *("prefill_attention_backend", "speculative_attention_mode", "cuda_graph_config", "cuda_graph_bs_prefill"),
        *("cuda_graph_max_bs_prefill", "cuda_graph_backend_prefill", "disable_prefill_cuda_graph"),
    ),
    "sglang.prefill_graphs",
)
# Fields that the engine sets itself, or that would take away what it stands on.
FIXED = frozenset(
    (
        *("enable_metrics", "incremental_streaming_output", "skip_tokenizer_init", "tokenizer_worker_num"),
        *("detokenizer_worker_num", "log_requests", "export_metrics_to_file"),
        # It would give every request what the engine refuses, or does not expect: penalties, stops, more choices.
        "preferred_sampling_params",
        *("custom_sigquit_handler", "is_embedding", "nnodes", "node_rank", "pp_size", "host", "port", "api_key"),
    )
)


def server_arguments(config: Config, target: Path, drafter: Path | None, known: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of ServerArgs.

    Args:
        target, drafter: directories; no drafter decodes one token a step. known: the names of ServerArgs' fields.

    Raises:
        ConfigError: a key of `sglang.server_args` that SGLang does not know, that is not to be set there, or that does
            not go with drafts.
    """
    full_prefill = config.sglang.prefill_graphs == "full"
    check_names(config.sglang.server_args, known, DECIDED | DECIDED_BY_FULL_PREFILL if full_prefill else DECIDED)
    if drafter is not None:
        check_drafts(config)
    model, engine, sglang = config.model, config.engine, config.sglang
    tp_size = max(1, int(config.replica.num_gpus)) if sglang.tp_size == "auto" else sglang.tp_size
    chosen: dict[str, Any] = {
        "model_path": str(target),
        "served_model_name": model.id,
        "dtype": model.dtype,
        "device": None if model.device == "auto" else model.device,
        "context_length": model.context_length,
        "max_running_requests": engine.max_running,
        "tp_size": tp_size,
        "attention_backend": sglang.attention_backend,
        "page_size": sglang.page_size,
        "mem_fraction_static": sglang.mem_fraction_static,
        "tool_call_parser": sglang.tool_call_parser,
        "reasoning_parser": sglang.reasoning_parser,
        "disable_cuda_graph": not engine.cuda_graphs,
        "enable_metrics": True,
        "incremental_streaming_output": True,
        "log_level": "warning",
        **speculation(config, drafter),
        **prefill_graphs(config, drafts=drafter is not None),
        **config.sglang.server_args,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def speculation(config: Config, drafter: Path | None) -> dict[str, Any]:
    """The part of the arguments that says how drafts are made; empty without them."""
    settings = config.speculation
    if drafter is None:
        return {}
    if settings.method == "chain":
        return {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(drafter)}
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": str(drafter),
        # Without a number the plugin has its own.
        "speculative_num_draft_tokens": None if settings.budget == "auto" else settings.budget + 1,
        "speculative_eagle_topk": settings.top_k,
    }


def prefill_graphs(config: Config, drafts: bool) -> dict[str, Any]:
    """The part of the arguments that says how prompts replay; empty where SGLang is to choose.

    Of the attention backends with which SGLang can capture a full prefill graph, FlashInfer is the one that also runs
    where trees are verified. They still are verified by the backend that steps have, and so is a chain.
    """
    if config.sglang.prefill_graphs != "full":
        return {}
    requests = min(config.engine.max_running, FULL_PREFILL_REQUESTS)
    found: dict[str, Any] = {
        "prefill_attention_backend": "flashinfer",
        "cuda_graph_config": {
            "prefill": {"backend": "full", "full_prefill_max_req": requests, "bs": list(FULL_PREFILL_TOKENS)}
        },
    }
    if drafts:
        # The plugin chooses triton only where nothing is said of attention.
        found["attention_backend"] = config.sglang.attention_backend or "triton"
        found["speculative_attention_mode"] = "decode"
    return found


def environment(config: Config) -> dict[str, str]:
    """Variables that SGLang's processes read, to be set before they start."""
    return {
        # Log-probabilities are the target's own, before temperature, as `engines.base` says.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_DDTREE_SPINE_FIRST": "1" if config.speculation.spine_first else "0",
    }


def check_drafts(config: Config) -> None:
    """Raises ConfigError for what gives wrong answers, or none, with a drafter. What else does not go with draft trees
    the plugin refuses, when SGLang resolves its arguments."""
    given = config.sglang.server_args
    method = f"speculation.method {config.speculation.method}"
    for name, why in NOT_WITH_DRAFTS.items():
        if given.get(name):
            param = f"sglang.server_args.{name}"
            raise ConfigError(f"{param} does not go with {method}: it {why}", param=param)
    if (given.get("attn_cp_size") or 1) > 1:
        param = "sglang.server_args.attn_cp_size"
        raise ConfigError(f"{param}: {method} needs all of a prompt's features on each rank", param=param)
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if given.get(name, 1.0) != 1.0:
            param = f"sglang.server_args.{name}"
            raise ConfigError(f"{param}: answers are the target's own with {method}", param=param)
    if config.speculation.method == "chain" and _number(os.environ.get("SGLANG_SIMULATE_ACC_LEN")) > 0:
        raise ConfigError("SGLANG_SIMULATE_ACC_LEN makes SGLang answer with drafts unseen", param="speculation.method")


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0  # SGLang's own to refuse


def check_names(given: Collection[str], known: Collection[str], decided: Mapping[str, str]) -> None:
    """Raises ConfigError for the first name that is decided by another key (`decided`: which), fixed, or unknown to
    SGLang."""
    for name in given:
        param = f"sglang.server_args.{name}"
        if name in decided:
            raise ConfigError(f"{param} is decided by {decided[name]}", param=param)
        if name in FIXED:
            raise ConfigError(f"{param} is set by the engine", param=param)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{param}: SGLang has no such argument{hint}", param=param)
