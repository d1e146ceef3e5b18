"""The laptop model, its drafter, and synchronous runs over them."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from serve_app.config import load_config
from serve_app.engines.base import Chunk, GenerateRequest, SamplingParams
from serve_app.engines.local.engine import _sequence
from serve_app.engines.local.loading import Parts, load
from serve_app.errors import ServeError
from serve_app.models import resolve, resolve_drafter

MODEL = "smollm2-135m"

SUBJECTS = [
    "photosynthesis", "the French Revolution", "binary search", "sourdough bread", "black holes", "compound interest",
    "a lighthouse keeper", "prime numbers", "the water cycle", "chess openings",
]  # fmt: skip
SHAPES = [
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write a short poem about {}.",
    "Write a Python function connected to {}, with a docstring.",
    "Answer briefly: why does {} matter? Then give an example, a counterexample, and one open question. "
    "Keep the tone friendly, and finish with a one-line summary.",
]
PROMPTS = [shape.format(subject) for subject in SUBJECTS for shape in SHAPES]


def drafter_path() -> Path | None:
    """The drafter named by the environment variable TEST_DRAFTER, else the shipped one, else None."""
    named = os.environ.get("TEST_DRAFTER")
    return Path(named) if named else resolve_drafter("auto", resolve(MODEL))


def parts(dtype: str, speculation: dict[str, Any], slots: int = 8) -> Parts:
    """The loaded laptop model, ready to step in this thread."""
    drafter = drafter_path()
    tree = {
        "model": {"source": MODEL, "drafter": str(drafter) if drafter else None, "dtype": dtype, "device": "cpu"},
        "engine": {"max_running": slots, "threads": 2},
        "speculation": speculation,
    }
    return load(load_config(tree, use_env=False), None)


@torch.inference_mode()
def generate(loaded: Parts, requests: Seq[tuple[Any, SamplingParams]], stagger: int = 1) -> list[list[Chunk]]:
    """Run prompts (text: a chat turn; tuple: token ids) to their ends, a new one joining every `stagger` steps."""
    results: list[list[Chunk]] = []
    for prompt, params in requests:
        chunks: list[Chunk] = []

        def sink(item: Chunk | ServeError, chunks: list[Chunk] = chunks) -> None:
            if isinstance(item, ServeError):
                raise item
            chunks.append(item)

        limit = params.max_tokens or 100
        ids = encode(loaded, prompt)
        sequence = _sequence(loaded, 0, ids, params, params.seed or 0, limit, sink)
        loaded.stepper.scheduler.add(sequence)
        results.append(chunks)
        for _ in range(stagger):
            loaded.stepper.step()
    while not loaded.stepper.scheduler.idle:
        loaded.stepper.step()
    return results


def encode(loaded: Parts, prompt: Any) -> list[int]:
    if isinstance(prompt, tuple):
        return list(prompt)
    chat = [{"role": "user", "content": prompt}]
    return loaded.prompts.encode(GenerateRequest("r", SamplingParams(), messages=chat))


def emitted(chunks: Seq[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def acceptance(results: Seq[Seq[Chunk]]) -> float:
    """Tokens per verify step; each choice's first chunk is prefill's."""
    steps = sum(len(chunks) - 1 for chunks in results)
    return sum(len(emitted(chunks[1:])) for chunks in results) / steps
