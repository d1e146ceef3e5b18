"""The engines of the GPU tests and how they are asked: every check's result or failure is kept and saved at once.

Most engines run in float16: with bfloat16's eight bits a small model ties its two best tokens every few dozen tokens,
and any change of batch shape decides anew; with eleven it does so rarely enough that equal tokens mean something.
(SGLang's norms have no float32.)

What this module does not do: judge (`test_sglang_ddtree.py` asserts).
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.sglang_fleet import Child, engine_arguments
from benchmarks.sharded import write_pair
from serve_app.config import load_config
from serve_app.engines.sglang.arguments import prefill_graphs

GREEDY = {"temperature": 0.0, "ignore_eos": False}
EXACT = {
    "dtype": "float16", "grammar_backend": "xgrammar", "context_length": 2048,
    "constrained_json_disable_any_whitespace": True,  # else a greedy answer may be spaces up to its limit
}  # fmt: skip
EIGHT = {"max_running_requests": 8}
MLA = {**EXACT, "grammar_backend": "none", "skip_tokenizer_init": True}
FLASHINFER = {**EXACT, **EIGHT, "attention_backend": "flashinfer", "speculative_draft_attention_backend": "flashinfer"}
# As the configuration's `sglang.prefill_graphs: full`.
FULL = {"engine": {"kind": "sglang", "max_running": 8}, "sglang": {"prefill_graphs": "full"}}
FULL_PREFILL = {
    "disable_prefill_cuda_graph": False, **prefill_graphs(load_config(FULL, use_env=False), drafts=True)
}  # fmt: skip
# As many as the machine has GPUs for, and both models' heads divide by.
RANKS = next(ranks for ranks in (8, 4, 2) if ranks <= max(2, torch.cuda.device_count()))
# Over NCCL alone: FlashInfer's fused all-reduce, which SGLang takes for this model, can use NVLink multicast.
MLA_RANKS = {"tp_size": RANKS, "disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
# name: (mode, changed arguments, environment)
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "ar": ("ar", {**EXACT, "cuda_graph_max_bs_decode": 16}, {}),
    "ddtree": ("ddtree-32", EXACT, {}),  # 16 running, graphs up to 8: both kinds of step in one batch's life
    "soak": ("ddtree-32", {**EXACT, **EIGHT}, {}),
    "dflash": ("dflash", {**EXACT, **EIGHT}, {}),
    "chain": ("ddtree-15", {**EXACT, **EIGHT, "speculative_eagle_topk": 1}, {}),
    "eager": ("ddtree-32", {**EXACT, "disable_cuda_graph": True}, {}),
    "page16": ("ddtree-32", {**EXACT, **EIGHT, "page_size": 16}, {}),
    "wide": ("ddtree-64", {**EXACT, **EIGHT}, {}),
    # As servers are by default: prompts, too, replay from graphs.
    "prompts": (
        "ddtree-32",
        {**EXACT, **EIGHT, "disable_prefill_cuda_graph": False, "cuda_graph_max_bs_prefill": 512},
        {},
    ),
    # And as one graph of all layers.
    "full": ("ddtree-32", {**EXACT, **EIGHT, **FULL_PREFILL}, {}),
    "dflash-full": ("dflash", {**EXACT, **EIGHT, **FULL_PREFILL}, {}),
    "plain": ("ddtree-32", {**EXACT, **EIGHT}, {"SGLANG_DDTREE_COMMIT_IN_GRAPH": "0"}),
    "deterministic": ("ddtree-32", {**EXACT, **EIGHT, "enable_deterministic_inference": True}, {}),
    "bf16": ("ddtree-32", EIGHT, {}),
    "flashinfer": ("ddtree-32", FLASHINFER, {}),
    "flashinfer16": ("ddtree-32", {**FLASHINFER, "page_size": 16}, {}),
    "mla-ar": ("ar", MLA, {}),
    "mla": ("ddtree-16", MLA, {}),
    "mla-ranks-ar": ("ar", {**MLA, **MLA_RANKS}, {}),
    "mla-ranks": ("ddtree-16", {**MLA, **MLA_RANKS}, {}),
    # The laptop model with heads added, over SGLang's own all-reduce.
    "ranks-ar": ("ar", {**EXACT, **EIGHT, "tp_size": RANKS}, {}),
    "ranks": ("ddtree-32", {**EXACT, **EIGHT, "tp_size": RANKS}, {}),
}
# SGLang itself then raises when an idle engine's pools do not add up.
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    # Several ranks start while the others fill one of their GPUs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}


class Fleet:
    """Engines started side by side and awaited one by one; `report` is written to OUT/bring_up.json after each stage.

    Args:
        arguments: model, drafter, out, seconds, prompts (how many), tokens, soak (seconds), stagger, modes
            (comma-separated names of CONFIGS), ready (seconds an engine may take to start).
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.seconds
        self.out: Path = arguments.out
        self.report: dict[str, Any] = {"stages": {}, "seconds": {}, "start": {}}
        self.failed: dict[str, str] = {}
        self._children: dict[str, Child] = {}
        self._sharded: dict[Path, tuple[Path, Path]] = {}

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def start(self) -> None:
        self._ready_by = time.monotonic() + self.arguments.ready
        for name in self.arguments.modes.split(","):
            mode, changes, env = CONFIGS[name]
            model, drafter = self.arguments.model, self.arguments.drafter
            if name.startswith("mla"):
                model, drafter = self._mla
            if "ranks" in name:
                model, drafter = self._for_ranks(model, drafter)
            fields = engine_arguments(str(model), str(drafter), mode, **changes)
            if name == "eager":
                env = {**env, "DDTREE_DUMP": str(self.out / "drafts.pt")}
            self._children[name] = Child(name, fields, self.out / f"{name}.log", {**ENVIRONMENT, **env})
            if len(self._children) == 1:
                time.sleep(self.arguments.stagger)  # it compiles what the others then find in the cache

    @cached_property
    def _mla(self) -> tuple[Path, Path]:
        from tests.gpu.mla_model import write_mla

        return write_mla(self.out.parent / "mla")

    def _for_ranks(self, model: Path, drafter: Path) -> tuple[Path, Path]:
        """Written once, for the engine with drafts and the one without."""
        if model not in self._sharded:
            folder = self.out.parent / f"sharded-{len(self._sharded)}"
            self._sharded[model] = write_pair(model, drafter, folder, RANKS)
        return self._sharded[model]

    def child(self, name: str) -> Child:
        """The engine, ready. Raises RuntimeError when it failed to start, LookupError when it was not asked for."""
        if name in self.failed:
            raise RuntimeError(self.failed[name])
        child = self._children[name]
        if child.start_s is None:
            try:
                child.wait_ready(min(self.left() - 5, self._ready_by - time.monotonic()))
            except RuntimeError as error:
                self.failed[name] = str(error)[-1500:]
                raise
            self.report["start"][name] = child.start_s
        return child

    def names(self) -> list[str]:
        return list(self._children)

    def stage(self, name: str, work: Callable[[], Any]) -> None:
        """Run `work`, keep its result or its failure, and save."""
        began = time.monotonic()
        try:
            if self.left() < 2:
                raise TimeoutError("no time left")
            result = work()
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"[-2500:]}
            traceback.print_exc()
        self.report["stages"][name] = result
        self.report["seconds"][name] = round(time.monotonic() - began, 1)
        (self.out / "bring_up.json").write_text(json.dumps(self.report, indent=1))

    def close(self) -> None:
        for child in self._children.values():
            child.close()

    # -- asking ------------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.arguments.model)

    def generate(self, name: str, prompts: list[Any], params: Any, **fields: Any) -> list[dict[str, Any]]:
        """One result per prompt; all at once."""
        answer = self.child(name).ask("generate", self.left(), prompts=prompts, params=params, **fields)
        return answer["results"]

    def greedy(self, name: str, prompts: list[Any], tokens: int, *, one_by_one: bool = False) -> list[dict[str, Any]]:
        params = {**GREEDY, "max_new_tokens": tokens}
        if not one_by_one:
            return self.generate(name, prompts, params)
        return [self.generate(name, [prompt], params)[0] for prompt in prompts]

    def compare(
        self, found: list[dict[str, Any]], expected: list[dict[str, Any]], prompts: list[Any], reference: str = "ar"
    ) -> dict[str, Any]:
        """How many outputs equal `expected`, and of the others where they part and how undecided the reference is."""
        differing = []
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours["ids"] != theirs["ids"]:
                pairs = zip([*ours["ids"], None], [*theirs["ids"], None], strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                differing.append({"prompt": index, "at": at, "lengths": [len(ours["ids"]), len(theirs["ids"])]})
        for entry in differing:
            index = entry["prompt"]
            entry |= self._gap(prompts[index], found[index]["ids"], expected[index]["ids"], entry["at"], reference)
        steps, made = sum(r["verify_steps"] for r in found), sum(len(r["ids"]) for r in found)
        return {
            "equal": len(prompts) - len(differing),
            "of": len(prompts),
            "acceptance_length": round((made - len(prompts)) / steps, 3) if steps else None,
            "stopped": sum(r["finish"]["type"] == "stop" for r in found),
            "differing": differing,
        }

    def _gap(self, prompt: Any, ours: list[int], theirs: list[int], at: int | None, reference: str) -> dict[str, Any]:
        """The reference's log-prob of its token less that of ours after the common start, which is given as a prompt:
        one forward decides both. Of a grammar's tokens neither need be among the best."""
        if at is None or at >= min(len(ours), len(theirs)):
            return {"gap": None}
        start = [*(prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt)), *theirs[:at]]
        asked = {"logprobs": 3, "tokens": [ours[at], theirs[at]]}
        (output,) = self.generate(reference, [start], {**GREEDY, "max_new_tokens": 1}, **asked)
        values = {token: value for value, token in output["token_logprobs"][0]}
        return {"gap": round(values[theirs[at]] - values[ours[at]], 5), "best": output["top"][0]}
