"""Several engines at once, one process each, on one GPU: they start side by side and are then asked one at a time.

What this module does not do: decide what to ask.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from load_tests.target import free_port

ROOT = Path(__file__).resolve().parent.parent
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TASKS = (
    "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.", "Why does {} matter?",
    "Write a poem about {}.", "Write a polite email asking about {}.", "What are common mistakes with {}?",
    "Compare {} with something similar.", "Write a Python function related to {}.", "Summarise the history of {}.",
)  # fmt: skip
TOPICS = (
    "prime numbers", "rainbows", "bread", "the number seven", "gravity", "chess", "volcanoes", "bicycles", "honey bees",
    "sorting", "the moon", "tides", "libraries", "trains", "sleep", "maps", "glass", "friendship", "winter", "tea",
)  # fmt: skip


def questions(count: int) -> list[str]:
    """The first `count` of 200 different questions, tasks and topics mixed."""
    pairs = [(TASKS[(i + j) % len(TASKS)], TOPICS[j]) for i in range(len(TASKS)) for j in range(len(TOPICS))]
    return [task.format(topic) for task, topic in pairs[:count]]


def chat_prompts(count: int) -> list[str]:
    """Those questions as the laptop model's chat prompts."""
    return [CHAT.format(question) for question in questions(count)]


def engine_arguments(model: str, drafter: str, mode: str, **changes: Any) -> dict[str, Any]:
    """SGLang's arguments for a mode: "ar", "ar-eager", "dflash", or "ddtree-N" with N the budget.

    The KV cache is sized by tokens: SGLang's fraction of free memory means little while other engines take theirs.
    """
    arguments: dict[str, Any] = {
        "model_path": model, "dtype": "bfloat16", "attention_backend": "triton", "sampling_backend": "pytorch",
        "grammar_backend": "none", "mem_fraction_static": 0.8, "max_total_tokens": 65536, "max_running_requests": 16,
        "cuda_graph_max_bs_decode": 8, "disable_prefill_cuda_graph": True, "enable_metrics": True,
        "log_level": "info", "random_seed": 1, "skip_server_warmup": True,
        "sleep_on_idle": True,  # the engines that are not asked leave the CPU to the one that is
        "nccl_port": free_port(),  # SGLang's own choice is taken by another of many engines that start together
    }  # fmt: skip
    if mode == "ar-eager":
        arguments["disable_cuda_graph"] = True
    elif mode != "ar":
        algorithm, _, budget = mode.partition("-")
        arguments |= {"speculative_algorithm": algorithm.upper(), "speculative_draft_model_path": drafter}
        if budget:
            arguments["speculative_num_draft_tokens"] = int(budget) + 1
    return arguments | changes


class Child:
    """A running engine process. `log` gets everything it prints. `program`: another one of the same
    protocol, as the interpreter is given it."""

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        log: Path,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (str(ROOT / "benchmarks" / "sglang_child.py"),),
    ) -> None:
        self.name = name
        self.start_s: float | None = None
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-u", *program, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT,
            env={**os.environ, **(env or {})}, start_new_session=True,
        )  # fmt: skip
        self._replies: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    @property
    def pid(self) -> int:
        """Above every process of this engine."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Raises RuntimeError when the engine fails to start, or not in time."""
        self.start_s = self._reply(timeout_s)["start_s"]

    def ask(self, do: str, timeout_s: float = 120, **fields: Any) -> dict[str, Any]:
        """The engine's answer. Raises RuntimeError on a failure, a dead engine or a timeout."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._reply(timeout_s)

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=max(timeout_s, 0.1))
        except Empty:
            raise RuntimeError(f"{self.name}: no answer in {timeout_s:.0f} s") from None
        if not line:
            raise RuntimeError(f"{self.name}: the engine's process ended")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process and everything it started (its own process group)."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, 15)
                self._process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        # What it read from has ended with the group.
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
