"""A step loop over the tiny target whose drafts are partly right, so that trees are really accepted, branch and miss.

A random drafter is almost never right. This one knows what plain decoding gave for each prompt and puts the true token
at a random rank of each depth, sometimes leaving it out. Everything else is the production loop.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from serve_app.config import SpeculationConfig
from serve_app.engines.base import Chunk, SamplingParams
from serve_app.engines.local.checkpoint import Checkpoint
from serve_app.engines.local.detokenizer import make_detokenizer
from serve_app.engines.local.penalties import LogitRules
from serve_app.engines.local.runner import GraphOptions, ModelRunner, Pending
from serve_app.engines.local.scheduler import Scheduler
from serve_app.engines.local.sequence import Sequence
from serve_app.engines.local.speculation import TreePlan
from serve_app.engines.local.step import Stepper
from serve_app.engines.local.stopping import TextStream
from serve_app.engines.local.target import Target, read_config
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.errors import ServeError
from serve_app.metrics import EngineMetrics

CPU = torch.device("cpu")
BLOCK, TOP_K, CONTEXT, END = 6, 4, 120, 2


class OracleRunner(ModelRunner):
    """Drafts from known continuations: `truth` maps a prompt to plain decoding's output."""

    scheduler: Scheduler
    truth: Mapping[tuple[int, ...], list[int]]
    rng: random.Random

    def draft(
        self, slots: Seq[int], starts: Seq[int], roots: Seq[int], pending: Seq[Pending], block: int
    ) -> tuple[Tensor, Tensor]:
        held = {sequence.slot: sequence for sequence in self.scheduler.running}
        tokens = []
        for slot in slots:
            sequence = held[slot]
            known = self.truth[tuple(sequence.prompt)][len(sequence.output) :]
            tokens.append([self._candidates(known[depth : depth + 1]) for depth in range(BLOCK - 1)])
        logps = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(len(slots), BLOCK - 1, TOP_K)
        return torch.tensor(tokens), logps

    def _candidates(self, truth: list[int]) -> list[int]:
        others = self.rng.sample([token for token in range(3, 259) if token not in truth], TOP_K)
        rank = self.rng.choice([0, 0, 0, 1, 1, 2, 3, 99])
        if truth and rank < TOP_K:
            others[rank] = truth[0]
        return others


class Rig:
    """The production step loop over the tiny target, without threads.

    Args:
        truth: None decodes plainly. budget: tree nodes; 0 with a truth is the chain.
    """

    def __init__(
        self,
        model: Path,
        truth: Mapping[tuple[int, ...], list[int]] | None = None,
        budget: int = 12,
        slots: int = 3,
        metrics: EngineMetrics | None = None,
    ) -> None:
        target = Target(Checkpoint(model, CPU, torch.float32, param="x"), read_config(model), CONTEXT + 64)
        self.vocabulary = Vocabulary(AutoTokenizer.from_pretrained(model))
        scheduler = Scheduler(slots, 32)
        options: dict[str, Any] = {
            "slots": slots + 1, "capacity": CONTEXT + 64, "top_k": TOP_K, "widths": [1], "draft_widths": [1],
            "graphs": GraphOptions([1], False, lambda role, rows, size: None, lambda role, reason: None),
        }  # fmt: skip
        runner = (ModelRunner if truth is None else OracleRunner)(target, None, **options)
        plan = None
        if isinstance(runner, OracleRunner) and truth is not None:
            runner.scheduler, runner.truth, runner.rng = scheduler, truth, random.Random(0)
            config = SpeculationConfig(method="ddtree" if budget else "chain", budget=budget or "auto", top_k=TOP_K)
            plan = TreePlan(config, BLOCK, CPU)
        self.stepper = Stepper(runner, scheduler, plan, self.vocabulary, metrics)
        self.vocab = target.shape.vocab
        self.steps = 0

    def add(self, prompt: Seq[int], params: SamplingParams) -> list[Chunk]:
        """Queue one prompt; the returned list fills while it runs."""
        chunks: list[Chunk] = []

        def sink(item: Chunk | ServeError) -> None:
            assert isinstance(item, Chunk), item
            chunks.append(item)

        limit = min(params.max_tokens or CONTEXT, CONTEXT - len(prompt))
        text = TextStream(params, make_detokenizer(self.vocabulary), limit, {END})
        rules = LogitRules(params, prompt, self.vocab, {END} | set(params.stop_token_ids), CPU)
        sequence = Sequence(0, list(prompt), params, params.seed or 0, text, sink, limit, rules=rules)
        self.stepper.scheduler.add(sequence)
        return chunks

    @torch.inference_mode()
    def run(self, requests: Seq[tuple[Seq[int], SamplingParams]]) -> list[list[Chunk]]:
        """Everything to its end; requests join one step apart."""
        results = []
        for prompt, params in requests:
            results.append(self.add(prompt, params))
            self.stepper.step()
        while not self.stepper.scheduler.idle:
            self.stepper.step()
            self.steps += 1
            assert self.steps < 5000
        return results


def tokens(chunks: Seq[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def text(chunks: Seq[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)
