"""The plugin against the released SGLang: what it asks of an algorithm, and what our hooks and copies rely on."""

import inspect
import pkgutil
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from serve_app.sglang_plugin.args import Options, check_backends, check_widths, validate_server_args
from serve_app.sglang_plugin.plugin import SUPPORTED, PluginError, assert_installed, check_version

EXPECTED = {
    "is_some": True, "is_none": False, "is_speculative": True, "is_eagle": False, "is_eagle3": False,
    "is_frozen_kv_mtp": False, "is_dflash": True, "is_dspark": False, "is_dflash_family": True, "is_standalone": False,
    "is_ngram": False, "supports_target_verify_for_draft": True, "supports_ragged_verify": False,
    "supports_grammar_overlap": True, "has_draft_kv": False, "carries_draft_hidden_states": False, "need_topk": False,
}  # fmt: skip


def algorithm() -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string("ddtree")


def test_sglang_knows_ddtree(sglang: ModuleType) -> None:
    assert algorithm().name == "DDTREE" and algorithm().supports_overlap
    assert_installed()


def test_every_method_of_a_built_in_algorithm_exists(sglang: ModuleType) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    names = {name for name, value in vars(SpeculativeAlgorithm).items() if inspect.isfunction(value)}
    missing = names - set(dir(algorithm())) - {name for name in names if name.startswith("_")} - set(vars(Enum))
    assert not missing


@pytest.mark.parametrize("name", EXPECTED)
def test_what_ddtree_answers(sglang: ModuleType, name: str) -> None:
    assert getattr(algorithm(), name)() is EXPECTED[name]


def test_no_predicate_goes_unexamined(sglang: ModuleType) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked = {name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_", "has_", "need_"))}
    assert asked <= set(EXPECTED)


def test_every_hook_target_takes_the_arguments_its_hook_expects(sglang: ModuleType) -> None:
    from serve_app.sglang_plugin.hooks import HOOKS

    expected = {
        "__post_init__": ["self"],
        "_generate_prefill_cuda_graph_batch_sizes": ["self", "max_bs"],
        "get_alloc_len_per_decode": ["server_args"],
        "get_req_to_token_extra_context_len": ["server_args"],
        "validate_dflash_request": ["req", "enable_overlap"],
        "spec_need_hidden_states": ["server_args"],
        "_decode_cuda_graph_runner_cls": ["self"],
        "resolve_dflash_verify_mask_policy": ["attn_backend"],
        "_forward_raw": ["self", "forward_batch", "pp_proxy_tensors", "reinit_attn_backend", "split_forward_count"],
        "_extend_forward_kwargs": ["self", "forward_batch", "pp_proxy_tensors"],
        "_forward_isolation": ["self", "batch", "overlap"],
        "update_finish_state": ["self", "new_accepted_len"],
        "init_cuda_graph_state": ["self", "max_bs", "max_num_tokens", "kv_indices_buf"],
        "process_batch_result_prefill": ["self", "batch", "result"],
        "process_batch_result_decode": ["self", "batch", "result"],
        "_apply_cuda_graph_metadata": ["self", "bs", "req_pool_indices", "seq_lens", "forward_mode", "spec_info"],
    }
    for hook in HOOKS:
        owner, name = hook.target.rsplit(".", 1)
        original = getattr(pkgutil.resolve_name(owner), name).__wrapped__
        assert list(inspect.signature(original).parameters)[: len(expected[name])] == expected[name], hook.target


def test_importers_of_a_hooked_function_got_the_hook(sglang: ModuleType) -> None:
    from sglang.srt.managers import scheduler
    from sglang.srt.speculative import dflash_utils

    assert scheduler.validate_dflash_request is dflash_utils.validate_dflash_request
    assert hasattr(scheduler.validate_dflash_request, "__wrapped__")


def test_a_missing_hook_is_an_error_not_a_log_line(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import allocation_sizing

    undone = allocation_sizing.get_alloc_len_per_decode.__wrapped__
    monkeypatch.setattr(allocation_sizing, "get_alloc_len_per_decode", undone)
    with pytest.raises(PluginError, match="allocation_sizing"):
        assert_installed()


def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.sglang_plugin.plugin.version", lambda name: "0.5.99")
    with pytest.raises(PluginError, match=rf"supports sglang {SUPPORTED[0]}, not 0\.5\.99"):
        check_version()


@pytest.mark.parametrize("algorithm", ["DDTREE", "DFLASH"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_eager_draft_keeps_the_dtype_of_its_embeddings(
    sglang: ModuleType, dtype: torch.dtype, algorithm: str
) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    embeds = torch.ones(2, 4, dtype=dtype)
    batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None, replace_positions=None)
    runner = SimpleNamespace(
        is_draft_worker=True, server_args=SimpleNamespace(speculative_algorithm=algorithm), is_generation=True,
        _pp_kwargs=lambda proxies: {},
    )  # fmt: skip
    assert ModelRunner._extend_forward_kwargs(runner, batch, None) == {"input_embeds": embeds}
    assert ModelRunner._extend_forward_kwargs(runner, batch, None)["input_embeds"].dtype == dtype


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("linear", [False, True])
def test_a_chain_is_captured_without_a_mask_whatever_backend_prompts_have(
    sglang: ModuleType, mode: str, linear: bool
) -> None:
    """No step would write it."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    class Unknown(TritonAttnBackend):
        """One that SGLang does not list as causal by itself."""

    triton, unknown = object.__new__(TritonAttnBackend), object.__new__(Unknown)
    pair = object.__new__(HybridAttnBackend)
    pair.spec_attn_is_decode = mode == "decode"
    pair.prefill_backend, pair.decode_backend = (unknown, triton) if mode == "decode" else (triton, unknown)
    backend = SimpleNamespace(full_attn_backend=pair) if linear else pair
    assert resolve_dflash_verify_mask_policy(backend) == ("TritonAttnBackend", False)
    assert resolve_dflash_verify_mask_policy(unknown) == ("Unknown", True)


def test_the_worker_overrides_methods_that_exist(sglang: ModuleType) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from serve_app.sglang_plugin.worker import DDTreeWorker

    for name in ("__init__", "init_attention_backends", "init_cuda_graphs", "forward_batch_generation"):
        ours, theirs = getattr(DDTreeWorker, name), getattr(DFlashWorkerV2, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def arguments(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "device": "cuda", "speculative_draft_model_path": "drafter", "pp_size": 1,
        "speculative_draft_window_size": None, "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def test_plain_arguments_pass() -> None:
    validate_server_args(arguments())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "cpu"}, "device cpu"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single"),
        ({"enable_lmcache": True}, "--enable-lmcache restores prefixes without what the drafter knows"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"radix_cache_backend": "mine"}, "--radix-cache-backend"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target"),
        ({"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="breakable"))}, "of kind breakable"),
    ],
)
def test_a_refusal_names_the_option(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        validate_server_args(arguments(**changes))


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)pp-size 2.*LoRA"):
        validate_server_args(arguments(pp_size=2, enable_lora=True))


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "mla", "fine"),
    [
        ("triton", "triton", "prefill", False, True),
        ("flashinfer", "flashinfer", "prefill", False, True),
        ("fa3", "fa3", "prefill", False, False),
        ("trtllm_mla", "triton", "decode", True, True),
        ("trtllm_mla", "triton", "prefill", True, False),
        ("flashinfer", "flashinfer", "decode", True, False),
        ("trtllm_mla", "trtllm_mla", "decode", True, False),
    ],
)
def test_only_backends_that_read_the_mask_verify(prefill: str, decode: str, mode: str, mla: bool, fine: bool) -> None:
    if fine:
        check_backends(prefill, decode, mode, mla)
    else:
        with pytest.raises(ValueError, match="DDTREE"):
            check_backends(prefill, decode, mode, mla)


@pytest.mark.parametrize("chosen", [Options(33, 8, 16), Options(16, 1, 16), Options(2, 1, 2), Options(128, 8, 16)])
def test_widths_that_work(chosen: Options) -> None:
    check_widths(chosen)


@pytest.mark.parametrize(
    "chosen", [Options(1, 8, 16), Options(129, 8, 16), Options(33, 0, 16), Options(17, 1, 16), Options(33, 8, 1)]
)
def test_widths_that_do_not(chosen: Options) -> None:
    with pytest.raises(ValueError, match=r"--speculative-"):
        check_widths(chosen)


def test_a_small_budget_shortens_the_path_but_not_the_drafters_block() -> None:
    chosen = Options(width=9, topk=8, block_size=16)
    assert (chosen.depth, chosen.path, chosen.slots) == (8, 9, 16)
