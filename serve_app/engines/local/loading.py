"""Assembles an engine's parts from a configuration: files → weights → caches → step loop. "auto" ends here.

What this module does not do: fetch (`serve_app.models`), or start threads.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from serve_app.config import Config
from serve_app.engines.checks import check_device
from serve_app.engines.drafter import drafter_path
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.drafter import Drafter, DrafterSpec
from serve_app.engines.local.prompts import PromptRenderer
from serve_app.engines.local.runner import GraphOptions, ModelRunner
from serve_app.engines.local.scheduler import Scheduler
from serve_app.engines.local.speculation import TreePlan
from serve_app.engines.local.step import Stepper
from serve_app.engines.local.target import Target, read_config
from serve_app.engines.local.token_floor import TokenFloor
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.errors import ConfigError
from serve_app.graphs import FallbackReason
from serve_app.metrics import EngineMetrics
from serve_app.models import ModelFiles, resolve

_ALIGNMENT = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Parts:
    """A loaded model, ready to step. `context`: tokens of prompt and answer together, at most."""

    stepper: Stepper
    runner: ModelRunner
    prompts: PromptRenderer
    vocabulary: Vocabulary
    context: int
    vocab: int
    end_tokens: frozenset[int]
    device: torch.device
    metrics: EngineMetrics | None


@dataclass(frozen=True)
class _Models:
    """Weights on their device. `capacity`: positions per KV slot, the context and a step's own rows."""

    target: Target
    target_config: Any
    drafter: Drafter | None
    plan: TreePlan | None
    context: int
    capacity: int


def load(config: Config, registry: CollectorRegistry | None, metrics: EngineMetrics | None = None) -> Parts:
    """Load everything that `config` names.

    Args:
        registry: where to declare the engine's series; None for no metrics.
        metrics: the series of an earlier load into the same registry, to go on with.

    Raises:
        ModelFetchError: files cannot be had. ConfigError: they, or a key, cannot be used.
    """
    torch.set_num_threads(_threads(config))
    files = resolve(config.model.source)
    models = _models(config, files)
    tokenizer = _tokenizer(files.path)
    vocabulary = Vocabulary(tokenizer)
    # Declared after everything that can be refused: a registry takes each series once.
    if metrics is None and registry is not None:
        longest = models.plan.depth + 1 if models.plan else 1
        metrics = EngineMetrics(registry, config.model.id, longest, [reason.value for reason in FallbackReason])
    runner = _runner(config, models, metrics)
    if metrics is not None:
        metrics.capacity(config.engine.max_running, config.engine.max_running * models.context)
    runner.capture()
    scheduler = Scheduler(config.engine.max_running, config.engine.prefill_chunk)
    return Parts(
        stepper=Stepper(runner, scheduler, models.plan, vocabulary, metrics),
        runner=runner,
        prompts=PromptRenderer(tokenizer, models.target.shape.vocab, TokenFloor(tokenizer, vocabulary)),
        vocabulary=vocabulary,
        context=models.context,
        vocab=models.target.shape.vocab,
        end_tokens=_end_tokens(files.path, models.target_config, tokenizer),
        device=models.target.device,
        metrics=metrics,
    )


def _models(config: Config, files: ModelFiles) -> _Models:
    device = _device(config)
    dtype = _dtype(config, device)
    target_config = read_config(files.path)
    context = _context(config, target_config)
    checkpoint = Checkpoint(files.path, device, dtype, param="model.source")
    spec = drafter_files = None
    if (where := drafter_path(config, files)) is not None:
        drafter_files = Checkpoint(where, device, dtype, param="model.drafter")
        spec = DrafterSpec.read(drafter_files.config)
    plan = TreePlan(config.speculation, spec.block_size, device) if spec else None
    margin = max([1, *(plan.widths() if plan else ()), spec.block_size if spec else 1])
    # CUDA's attention kernels want masks whose rows are aligned.
    capacity = -(-(context + margin) // _ALIGNMENT) * _ALIGNMENT
    target = Target(checkpoint, target_config, capacity, spec.feature_layers if spec else ())
    drafter = None
    if spec is not None and drafter_files is not None:
        spec.check_target(target.shape)
        drafter = Drafter(drafter_files, spec, capacity)
    return _Models(target, target_config, drafter, plan, context, capacity)


def _runner(config: Config, models: _Models, metrics: EngineMetrics | None) -> ModelRunner:
    slots, plan = config.engine.max_running, models.plan
    return ModelRunner(
        models.target,
        models.drafter,
        slots=slots + 1,
        capacity=models.capacity,
        top_k=plan.top_k if plan else 1,
        widths=plan.widths() if plan else [1],
        draft_widths=plan.blocks() if plan else [1],
        graphs=GraphOptions(
            _batch_sizes(slots),
            config.engine.cuda_graphs,
            metrics.graph_replay if metrics else lambda role, padding, size: None,
            metrics.graph_fallback if metrics else lambda role, reason: None,
            metrics.graph_capture if metrics else lambda role, graphs, seconds, reserved: None,
        ),
    )


def _threads(config: Config) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if config.engine.threads == "auto" else int(config.engine.threads)


def _device(config: Config) -> torch.device:
    wanted = config.model.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(config)
    return torch.device(wanted)


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it, float32 on older CPUs (emulated bfloat16 is slower)."""
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype]
    if device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return torch.bfloat16
    return torch.float32


def _context(config: Config, target_config: Any) -> int:
    longest = int(target_config.max_position_embeddings)
    wanted = config.model.context_length
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"context_length {wanted} exceeds the model's {longest} positions", param="model.context_length"
        )
    return wanted or longest


def _batch_sizes(slots: int) -> list[int]:
    """Powers of two below the largest batch, and the largest."""
    return sorted({*(1 << n for n in range(slots.bit_length()) if 1 << n <= slots), slots})


def _tokenizer(path: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load the tokenizer in {path}: {error}", param="model.source") from None


def _end_tokens(path: Path, target_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that the model's files call an end: config.json and generation_config.json, else the tokenizer's."""
    found: set[int] = set()
    generation: dict[str, Any] = {}
    if (path / "generation_config.json").exists():
        try:
            generation = json.loads((path / "generation_config.json").read_text())
        except ValueError as error:
            reason = f"{path / 'generation_config.json'} is not JSON: {error}"
            raise ConfigError(reason, param="model.source") from None
    for value in (target_config.eos_token_id, generation.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if not found and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
