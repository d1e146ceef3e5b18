"""ServerArgs of the released SGLang, resolved with DDTREE on a machine without a GPU."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFTER = {
    **TARGET, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "head_dim": 16, "block_size": 12,
    "num_target_layers": 2, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
}  # fmt: skip


@pytest.fixture
def resolve(sglang: ModuleType, tmp_path: Path) -> Any:
    from sglang.srt.server_args import ServerArgs

    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    def made(**changes: Any) -> Any:
        fields = {
            "model_path": str(tmp_path / "target"), "speculative_draft_model_path": str(tmp_path / "drafter"),
            "speculative_algorithm": "ddtree", "device": "cuda", "sampling_backend": "pytorch",
            "grammar_backend": "none", "mem_fraction_static": 0.5, "cuda_graph_max_bs_decode": 4,
            "disable_prefill_cuda_graph": True,
        }  # fmt: skip
        return ServerArgs(**{**fields, **changes})

    return made


@pytest.mark.filterwarnings("ignore")
def test_defaults(resolve: Any) -> None:
    from serve_app.sglang_plugin.args import Options, options

    args = resolve()
    assert options(args) == Options(width=33, topk=8, block_size=12)
    assert (args.attention_backend, args.speculative_draft_attention_backend) == ("triton", "triton")
    assert not args.disable_overlap_schedule and args.max_running_requests == 48


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [1, 16])
def test_reservations_cover_block_and_tree(resolve: Any, page: int) -> None:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode, get_req_to_token_extra_context_len

    args = resolve(speculative_num_draft_tokens=9, page_size=page)
    assert get_alloc_len_per_decode(args) == 12
    assert get_req_to_token_extra_context_len(args) >= 2 * 12 + page


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [1, 16])
def test_a_chains_reservations_stay_in_their_row(resolve: Any, page: int) -> None:
    """SGLang's DFLASH reserves two blocks ahead; where pages are one token its rows have room for one."""
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    args = resolve(speculative_algorithm="DFLASH", attention_backend="triton", page_size=page)
    assert get_req_to_token_extra_context_len(args) >= 2 * 12 + page


@pytest.mark.filterwarnings("ignore")
def test_a_window_is_refused_whatever_pool_it_has(resolve: Any) -> None:
    """`disable_hybrid_swa_memory` gives such a model an ordinary pool; its window counts a tree's rows all the same."""
    from serve_app.sglang_plugin.plugin import PluginError
    from serve_app.sglang_plugin.worker import _refuse_model

    runner = SimpleNamespace(model_config=resolve().get_model_config(), is_hybrid_swa=False, sliding_window_size=None)
    _refuse_model(runner)
    runner.sliding_window_size = 127
    with pytest.raises(PluginError, match="sliding-window"):
        _refuse_model(runner)


@pytest.mark.filterwarnings("ignore")
def test_the_draft_worker_is_told_its_block(resolve: Any) -> None:
    from sglang.srt.runtime_context import get_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    args = resolve()
    get_context().set_server_args(args)
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    assert algorithm.get_num_tokens_per_req_for_target_verify(33, is_draft_worker=False) == 33
    assert algorithm.get_num_tokens_per_req_for_target_verify(33, is_draft_worker=True) == 12


@pytest.mark.filterwarnings("ignore")
def test_full_prefill_graphs_and_trees(resolve: Any) -> None:
    """What the engine asks for: SGLang resolves it, and the tree is verified by the backend of steps."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    from serve_app.config import load_config
    from serve_app.engines.sglang.arguments import prefill_graphs

    tree = {"engine": {"kind": "sglang", "max_running": 4}, "sglang": {"prefill_graphs": "full"}}
    chosen = prefill_graphs(load_config(tree, use_env=False), drafts=True)
    args = resolve(**chosen, disable_prefill_cuda_graph=False)
    assert attention_backends_of(resolved_view(args)) == ("flashinfer", "triton")
    assert args.speculative_draft_attention_backend == "triton"
    prefill = args.cuda_graph_config.prefill
    asked = chosen["cuda_graph_config"]["prefill"]
    assert (prefill.backend, prefill.bs, prefill.full_prefill_max_req) == ("full", asked["bs"], 4)
    assert args.cuda_graph_config.decode.max_bs == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "smallest"),
    [
        ({"cuda_graph_backend_prefill": "breakable"}, [1, 2, 4, 8]),
        ({"cuda_graph_backend_prefill": "tc_piecewise"}, [4, 8, 12, 16]),
        ({"cuda_graph_bs_prefill": [16, 32]}, [16, 32]),
        (
            {
                "speculative_algorithm": "DFLASH",
                "attention_backend": "triton",
                "cuda_graph_backend_prefill": "breakable",
            },
            [4, 8, 12, 16],
        ),
    ],
)
def test_a_prompt_with_one_new_token_finds_a_graph(resolve: Any, changes: dict[str, Any], smallest: list[int]) -> None:
    prefill = resolve(disable_prefill_cuda_graph=False, **changes).cuda_graph_config.prefill
    assert prefill.bs[:4] == smallest


@pytest.mark.filterwarnings("ignore")
def test_a_backend_that_ignores_the_mask_is_refused(resolve: Any) -> None:
    with pytest.raises(ValueError, match="fa3 does not read a tree mask"):
        resolve(attention_backend="fa3")


@pytest.mark.filterwarnings("ignore")
def test_other_algorithms_resolve_as_before(resolve: Any) -> None:
    args = resolve(speculative_algorithm="DFLASH", attention_backend="triton")
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (12, 1)
