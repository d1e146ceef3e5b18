"""Attention plans written by the step itself: where it may, and for how long.

SGLang plans the attention of each captured forward with a dozen small launches. Draft and verify forward see the same
context, so the kernel that reads the request table anyway (`prepare`) writes both plans in the same launch, and
SGLang's planning is skipped. Backends that plan in another way keep it.

What this module does not do: launch.
"""

from __future__ import annotations

import os
from typing import Any

from serve_app.sglang_plugin.prepare import Plan, StepPlan

SWITCH = "SGLANG_DDTREE_PLAN_IN_STEP"


class Planner:
    """The two backends of a worker, and the plan that its step writes for them.

    Args:
        draft_runner, target_runner: ModelRunners whose decode graphs are captured, or not.
    """

    def __init__(self, draft_runner: Any, target_runner: Any) -> None:
        self._backends = [_backend(draft_runner), _backend(target_runner)]
        self._plan: StepPlan | None = None
        if os.environ.get(SWITCH, "1") != "0" and all(backend is not None for backend in self._backends):
            rows = min(runner.decode_cuda_graph_runner.max_bs for runner in (draft_runner, target_runner))
            draft, verify = (_captured(backend) for backend in self._backends)
            self._plan = StepPlan(draft, verify, int(rows))

    @property
    def active(self) -> bool:
        return self._plan is not None

    def plan_of(self, size: int) -> StepPlan | None:
        """The plan to write for a step of `size` requests; None where the step may not plan."""
        return self._plan if self._plan is not None and size <= self._plan.rows else None

    def begin(self, size: int) -> StepPlan | None:
        """Likewise, and the backends rely on it in this step's forwards; None leaves it to them."""
        plan = self.plan_of(size)
        self._tell(plan is not None)
        return plan

    def end(self) -> None:
        """The step is over: a forward that ran eagerly has left its plan unused."""
        self._tell(False)

    def _tell(self, planned: bool) -> None:
        for backend in self._backends:
            if backend is not None:
                backend.ddtree_planned = planned


def take_plan(backend: Any) -> bool:
    """Whether the running step has planned `backend`'s next captured forward; true once per step."""
    planned: bool = getattr(backend, "ddtree_planned", False)
    if planned:
        backend.ddtree_planned = False
    return planned


def _backend(runner: Any) -> Any:
    """The backend of `runner`'s captured verify forwards if its metadata is what `Plan` says, else None."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend, graphs = runner.attn_backend, runner.decode_cuda_graph_runner
    if type(backend) is HybridAttnBackend:
        backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
    if type(backend) is not TritonAttnBackend or not hasattr(graphs, "max_bs"):
        return None
    # Window metadata, contexts split over ranks and virtual slots are planned by SGLang.
    window = backend.sliding_window_size
    plain = (window is None or window <= 0) and backend.dcp_size == 1 and backend._translate_kv_loc is None
    return backend if plain else None


def _captured(backend: Any) -> Plan:
    return Plan(backend.kv_indptr, backend.cuda_graph_kv_indices, backend.qo_indptr, backend.mask_indptr)
