"""How a forward becomes something that can be replayed: CUDA graphs, or the same Python again.

What this module does not do: own the buffers that a captured forward reads, or decide when to replay (`graphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

Replay = Callable[[], Any]


class Capturer(Protocol):
    def capture(self, forward: Callable[[], Any]) -> Replay:
        """Record `forward` (no arguments: it reads and writes fixed memory). The result repeats it and returns its
        output; the output's memory is reused by the next replay of anything this capturer recorded."""

    def reset(self) -> None:
        """Everything recorded so far has been dropped."""


class CudaCapturer:
    """Captures CUDA graphs that share one memory pool, so graphs of one capturer must not run at the same time.

    Args:
        device: the CUDA device.
        warmup: runs before capture, on a side stream: they make lazy initialisation (cuBLAS workspaces, autotuning,
            compiled kernels) happen outside the graph.
    """

    def __init__(self, device: torch.device, warmup: int = 2) -> None:
        self._device = device
        self._warmup = warmup
        self.reset()
        self._stream = torch.cuda.Stream(device)

    def reset(self) -> None:
        # A pool dies with its last graph, and its handle cannot be used again.
        self._pool = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def capture(self, forward: Callable[[], Any]) -> Replay:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(self._warmup):
                    forward()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                output = self._record(graph, forward)
            except Exception:
                self._recover(graph)
                raise

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def _record(self, graph: torch.cuda.CUDAGraph, forward: Callable[[], Any]) -> Any:
        # thread_local: other threads of the process may allocate or synchronise meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            return forward()

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the process usable after a capture that the driver invalidated (a forward that synchronises does that).

        torch 2.11 then skips the end of its own bookkeeping: the pool stays "recording", so every later capture into it
        fails, and the default generator stays "capturing", so every later random number fails.
        """
        with suppress(RuntimeError):
            graph.reset()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        # Graphs captured so far keep the old pool alive.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        # A capture that succeeds resets the generator.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)


class RerunCapturer:
    """Replays by calling the forward again on the same buffers: refresh and padding behave as under CUDA graphs, on
    any device. For tests and for debugging a graph that gives other numbers than eager."""

    @torch.no_grad()
    def capture(self, forward: Callable[[], Any]) -> Replay:
        forward()
        return torch.no_grad()(forward)

    def reset(self) -> None:
        pass
