"""The classifier gives a reason where SGLang's own runner refuses, and the reason is the condition that held."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Mode:
    def __init__(self, graphable: bool = True) -> None:
        self.graphable = graphable

    def is_cuda_graph(self) -> bool:
        return self.graphable

    def is_target_verify(self) -> bool:
        return True


def runner(**changes: Any) -> Any:
    fields = {
        "ragged_verify_mode": False, "captured_req_width": 33, "disable_padding": False, "max_bs": 8,
        "require_mlp_tp_gather": False, "require_mlp_sync": False, "enable_two_batch_overlap": False,
        "is_encoder_decoder": False, "enable_pdmux": False, "backend": SimpleNamespace(can_run=lambda *_: False),
        "model_runner": SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False), server_args=None),
    }  # fmt: skip
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    made = DecodeCudaGraphRunner.__new__(DecodeCudaGraphRunner)
    made.__dict__.update({**fields, **changes})
    return made


def batch(**changes: Any) -> SimpleNamespace:
    fields = {
        "forward_mode": Mode(), "replace_embeds": None, "spec_info": SimpleNamespace(num_tokens_per_req=33),
        "batch_size": 4, "lora_ids": None, "can_run_dp_cuda_graph": True, "can_run_tbo": True, "encoder_lens": None,
        "original_global_num_tokens_cpu": None,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


CASES = [
    ("replace_embeds", {}, {"replace_embeds": object()}),
    ("width_mismatch", {}, {"spec_info": SimpleNamespace(num_tokens_per_req=16)}),
    ("bs_exceeds_max", {}, {"batch_size": 9}),
    ("bs_exceeds_max", {"require_mlp_tp_gather": True}, {"original_global_num_tokens_cpu": [1, 9]}),
    ("shape_not_captured", {"disable_padding": True}, {"batch_size": 3}),
    ("dp_sync", {"require_mlp_sync": True}, {"can_run_dp_cuda_graph": False}),
    ("tbo", {"enable_two_batch_overlap": True}, {"can_run_tbo": False}),
]


@pytest.mark.parametrize(("reason", "of_runner", "of_batch"), CASES)
def test_refused_batches_have_their_reason(
    sglang: ModuleType, reason: str, of_runner: dict[str, Any], of_batch: dict[str, Any]
) -> None:
    from serve_app.sglang_plugin.graph import fallback_reason

    refusing, refused = runner(**of_runner), batch(**of_batch)
    assert not refusing.can_run_graph(refused)
    assert fallback_reason(refusing, refused) == reason


@pytest.mark.parametrize("size", [1, 8])
def test_batches_within_the_captured_sizes_are_replayed(sglang: ModuleType, size: int) -> None:
    assert runner().can_run_graph(batch(batch_size=size))


def test_reasons_that_never_reach_can_run_graph(sglang: ModuleType) -> None:
    from serve_app.sglang_plugin.graph import Fallback, fallback_reason

    class EagerRunner:
        pass

    assert fallback_reason(None, batch()) == Fallback.NO_RUNNER
    assert fallback_reason(EagerRunner(), batch()) == Fallback.EAGER_RUNNER
    assert fallback_reason(runner(), batch(forward_mode=Mode(False))) == Fallback.MODE


def test_a_forward_counts_once_although_it_is_asked_twice(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.sglang_plugin import hooks, metrics

    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(metrics, "graph_fallback", lambda role, reason: counted.append((role, str(reason))))
    graphs, refused = runner(), batch(batch_size=9)
    target = SimpleNamespace(
        is_draft_worker=False, decode_cuda_graph_runner=graphs,
        server_args=SimpleNamespace(speculative_algorithm="DDTREE"),
    )  # fmt: skip

    def forward(model_runner: Any, forward_batch: Any) -> SimpleNamespace:
        asked = [graphs.can_run_graph(forward_batch), graphs.can_run_graph(forward_batch)]
        return SimpleNamespace(can_run_graph=asked[-1])

    hooks.forward_raw(forward, target, refused)
    assert counted == [("target", "bs_exceeds_max")]


def test_other_algorithms_are_not_counted(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.sglang_plugin import hooks, metrics

    monkeypatch.setattr(metrics, "graph_fallback", lambda *_: pytest.fail("counted"))
    target = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="DFLASH"), is_draft_worker=False)
    hooks.forward_raw(lambda *_: SimpleNamespace(can_run_graph=False), target, batch())


@pytest.mark.parametrize("verify", [False, True])
def test_a_verification_that_no_decode_graph_fits_is_never_taken_for_a_prompt(sglang: ModuleType, verify: bool) -> None:
    """The graphs of prompts know no tree mask."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    made = PrefillCudaGraphRunner.__new__(PrefillCudaGraphRunner)
    made.__dict__.update(
        _is_full_backend=False, prefill_backend_name="breakable", has_mha_companion_layers=False,
        capture_hidden_mode=CaptureHiddenMode.FULL, max_num_tokens=512, capture_num_tokens=[297, 512],
    )  # fmt: skip
    asked = {
        "batch_size": 9,
        "num_tokens": 9 * 33,
        "input_embeds": None,
        "replace_embeds": None,
        "prefix_lens": [5] * 9,
    }
    replays = made.can_replay_locally(
        **asked, is_target_verify=verify, capture_hidden_mode=CaptureHiddenMode.FULL, return_logprob=False
    )
    assert replays is not verify
