"""The step's own attention plan against what SGLang's backend computes for the same forward."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sglang_plugin.conftest import DEVICE

BLOCK, WIDTH, CONTEXT, FILL = 6, 9, 700, 1


def backend(rows: int, table: Tensor, width: int) -> Any:
    """SGLang's Triton backend with the state that its planning of a captured verify forward touches."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    made = TritonAttnBackend.__new__(TritonAttnBackend)
    made.device, made.num_draft_tokens, made.req_to_token = DEVICE, width, table
    made.sliding_window_size, made.dcp_size, made._translate_kv_loc, made._verify_mask = None, 1, None, None
    made.window_kv_indptr = None
    made.kv_indptr = torch.zeros(rows + 3, dtype=torch.int32, device=DEVICE)
    made.qo_indptr, made.mask_indptr = (torch.zeros(rows + 3, dtype=torch.int64, device=DEVICE) for _ in range(2))
    made.cuda_graph_kv_indices = torch.zeros(rows * CONTEXT, dtype=torch.int64, device=DEVICE)
    return made


def runner(attention: Any, rows: int) -> SimpleNamespace:
    return SimpleNamespace(attn_backend=attention, decode_cuda_graph_runner=SimpleNamespace(max_bs=rows))


def planned(made: Any) -> list[Tensor]:
    return [made.kv_indptr, made.cuda_graph_kv_indices, made.qo_indptr, made.mask_indptr]


@pytest.fixture
def table() -> Tensor:
    torch.manual_seed(3)
    return (torch.randperm(8 * CONTEXT).view(8, CONTEXT) + 1).int().to(DEVICE)


@pytest.mark.parametrize("lengths", [[1], [300, 7, 1, 655], [256, 257, 255, 512, 3]], ids=str)
def test_both_plans_equal_sglangs(sglang: ModuleType, table: Tensor, lengths: list[int]) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from serve_app.sglang_plugin.plan import Planner
    from serve_app.sglang_plugin.prepare import prepare_step

    batch, rows = len(lengths), 5
    starts = torch.tensor(lengths, device=DEVICE)
    requests = torch.tensor([6, 0, 3, 1, 7][:batch], device=DEVICE)
    draft, verify = backend(rows, table, WIDTH), backend(rows, table, WIDTH)
    plan = Planner(runner(draft, rows), runner(verify, rows)).begin(batch)
    assert plan is not None
    out = [torch.zeros(batch, count, dtype=torch.int64, device=DEVICE) for count in (BLOCK, BLOCK, BLOCK, WIDTH)]
    roots = torch.arange(batch, device=DEVICE)
    prepare_step(roots, starts, requests, table, 5, tuple(out), plan)
    alone = [torch.zeros_like(tensor) for tensor in out]
    prepare_step(roots, starts, requests, table, 5, tuple(alone))
    assert all(torch.equal(a, b) for a, b in zip(out, alone, strict=True)), "planning changes nothing else"
    padding = torch.full((rows - batch,), FILL, device=DEVICE)
    for ours, width in ((draft, BLOCK), (verify, WIDTH)):
        theirs = backend(rows, table, WIDTH)
        theirs._apply_cuda_graph_metadata(
            bs=rows,
            req_pool_indices=torch.cat((requests, padding.new_zeros(rows - batch))),
            seq_lens=torch.cat((starts, padding)),
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=SimpleNamespace(draft_token_num=width, custom_mask=None),
        )
        used = sum(lengths)
        theirs.cuda_graph_kv_indices[used:] = 0  # padding looks at some slot; ours at slot 0, which holds nothing
        assert all(torch.equal(a, b) for a, b in zip(planned(ours), planned(theirs), strict=True))


def test_a_planned_forward_is_not_planned_again_and_the_next_one_is(sglang: ModuleType, table: Tensor) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from serve_app.sglang_plugin.plan import Planner

    draft, verify = backend(4, table, WIDTH), backend(4, table, WIDTH)
    planner = Planner(runner(draft, 4), runner(verify, 4))
    asked = {
        "bs": 1, "req_pool_indices": torch.tensor([2], device=DEVICE), "seq_lens": torch.tensor([9], device=DEVICE),
        "forward_mode": ForwardMode.TARGET_VERIFY, "spec_info": None,
    }  # fmt: skip
    assert planner.begin(1) is not None
    draft._apply_cuda_graph_metadata(**asked)
    assert not draft.cuda_graph_kv_indices.any(), "the step has planned it"
    draft._apply_cuda_graph_metadata(**asked)
    assert draft.cuda_graph_kv_indices[:9].tolist() == table[2, :9].tolist()
    planner.end()
    verify._apply_cuda_graph_metadata(**asked)
    assert verify.cuda_graph_kv_indices[:9].all(), "a plan does not outlive its step"


def test_what_the_step_may_not_plan_is_left_to_sglang(
    sglang: ModuleType, table: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.sglang_plugin.plan import SWITCH, Planner

    plain, windowed = backend(4, table, WIDTH), backend(4, table, WIDTH)
    windowed.sliding_window_size = 128
    for other in (windowed, SimpleNamespace()):
        planner = Planner(runner(plain, 4), runner(other, 4))
        assert not planner.active and planner.begin(1) is None
    without_graphs = SimpleNamespace(attn_backend=plain, decode_cuda_graph_runner=None)
    assert not Planner(without_graphs, runner(plain, 4)).active
    assert Planner(runner(plain, 4), runner(plain, 2)).begin(3) is None, "more requests than the graphs hold"
    monkeypatch.setenv(SWITCH, "0")
    assert not Planner(runner(plain, 4), runner(plain, 4)).active
