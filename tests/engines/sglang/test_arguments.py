"""Configuration → ServerArgs: what each key becomes, and the refusal of names that SGLang does not know."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import load_config
from serve_app.engines.sglang.arguments import DECIDED, FIXED, environment, server_arguments
from serve_app.engines.sglang.loading import prepare
from serve_app.errors import ConfigError
from serve_app.sglang_plugin.args import NOT_WITH_DRAFTS
from tests.conftest import require_sglang

TARGET, DRAFTER = Path("/models/t"), Path("/models/d")
KNOWN = {*DECIDED, *FIXED, "trust_remote_code", "speculative_attention_mode"}


def arguments(drafter: Path | None = DRAFTER, known: set[str] = KNOWN, **sections: dict[str, Any]) -> dict[str, Any]:
    tree = {"engine": {"kind": "sglang"}, **sections}
    return server_arguments(load_config(tree, use_env=False), TARGET, drafter, known)


def test_the_defaults_draft_trees_of_the_plugins_size() -> None:
    made = arguments()
    assert made["model_path"] == "/models/t" and made["max_running_requests"] == 8 and made["tp_size"] == 1
    drafts = {name: value for name, value in made.items() if name.startswith("speculative_")}
    assert drafts == {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": "/models/d",
        "speculative_eagle_topk": 8,
    }


def test_a_budget_leaves_the_root_out() -> None:
    assert arguments(speculation={"budget": 15})["speculative_num_draft_tokens"] == 16


def test_what_nobody_set_is_left_to_sglang() -> None:
    assert not {"device", "context_length", "page_size", "attention_backend"} & set(arguments())


@pytest.mark.parametrize(
    ("sections", "drafter", "algorithm"),
    [
        ({"speculation": {"method": "chain"}}, DRAFTER, "DFLASH"),
        ({"speculation": {"budget": 15, "top_k": 4}}, DRAFTER, "DDTREE"),
        ({}, None, None),
    ],
)
def test_the_method_is_the_algorithm(sections: dict[str, Any], drafter: Path | None, algorithm: str | None) -> None:
    assert arguments(drafter, **sections).get("speculative_algorithm") == algorithm


@pytest.mark.parametrize(("sglang", "gpus", "size"), [({}, 8, 8), ({"tp_size": 2}, 8, 2), ({}, 0, 1)])
def test_a_replicas_gpus_share_the_model(sglang: dict[str, Any], gpus: int, size: int) -> None:
    assert arguments(sglang=sglang, replica={"num_gpus": gpus})["tp_size"] == size


def test_full_prefill_graphs_beside_trees_that_triton_verifies() -> None:
    made = arguments(sglang={"prefill_graphs": "full"}, engine={"kind": "sglang", "max_running": 100})
    assert (made["prefill_attention_backend"], made["attention_backend"]) == ("flashinfer", "triton")
    assert made["speculative_attention_mode"] == "decode"
    prefill = made["cuda_graph_config"]["prefill"]
    assert prefill["backend"] == "full" and prefill["full_prefill_max_req"] == 64
    # SGLang replays no graph for less than half of its tokens: any number has one, up to the largest.
    sizes = prefill["bs"]
    assert all(min(size for size in sizes if size >= n) <= 2 * n for n in range(1, sizes[-1] + 1))


def test_without_drafts_steps_have_the_backend_that_sglang_chooses() -> None:
    made = arguments(None, sglang={"prefill_graphs": "full"})
    assert (
        made["prefill_attention_backend"] == "flashinfer" and made["cuda_graph_config"]["prefill"]["backend"] == "full"
    )
    assert not {"attention_backend", "speculative_attention_mode"} & set(made)


def test_a_chain_is_verified_by_the_backend_of_steps_too() -> None:
    made = arguments(sglang={"prefill_graphs": "full"}, speculation={"method": "chain"})
    assert (made["speculative_algorithm"], made["attention_backend"]) == ("DFLASH", "triton")
    assert made["speculative_attention_mode"] == "decode"


@pytest.mark.parametrize("name", ["cuda_graph_config", "prefill_attention_backend", "disable_prefill_cuda_graph"])
def test_what_full_prefill_graphs_decide_is_not_said_otherwise(name: str) -> None:
    """One of them overridden would leave the others without the graphs that they are for."""
    given = {"server_args": {name: 1}}
    assert arguments(known={*KNOWN, name}, sglang=given)[name] == 1
    with pytest.raises(ConfigError, match=r"decided by sglang\.prefill_graphs") as caught:
        arguments(known={*KNOWN, name}, sglang={**given, "prefill_graphs": "full"})
    assert caught.value.param == f"sglang.server_args.{name}"


def test_full_prefill_graphs_need_graphs() -> None:
    with pytest.raises(ConfigError, match=r"sglang\.prefill_graphs full needs engine\.cuda_graphs"):
        arguments(sglang={"prefill_graphs": "full"}, engine={"kind": "sglang", "cuda_graphs": False})


def test_a_chosen_backend_verifies() -> None:
    made = arguments(sglang={"prefill_graphs": "full", "attention_backend": "flashinfer"})
    assert made["attention_backend"] == "flashinfer"


def test_further_arguments_pass_through() -> None:
    assert arguments(sglang={"server_args": {"trust_remote_code": True}})["trust_remote_code"] is True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trust_remote_cod", "did you mean trust_remote_code"),
        ("none_of_them_at_all", "no such argument"),
        ("model_path", "decided by model.source"),
        ("skip_tokenizer_init", "set by the engine"),
        ("preferred_sampling_params", "set by the engine"),
    ],
)
def test_a_wrong_name_is_refused_with_its_path(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        arguments(sglang={"server_args": {name: 1}})
    assert caught.value.param == f"sglang.server_args.{name}"


@pytest.mark.parametrize("method", ["chain", "ddtree"])
@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, True) for name in NOT_WITH_DRAFTS), ("attn_cp_size", 2), ("speculative_accept_threshold_acc", 0.5)],
)
def test_what_does_not_go_with_a_drafter_is_refused_with_its_path(method: str, name: str, value: Any) -> None:
    sections = {"sglang": {"server_args": {name: value}}, "speculation": {"method": method}}
    with pytest.raises(ConfigError, match=f"speculation.method {method}") as caught:
        arguments(known={*KNOWN, name}, **sections)
    assert caught.value.param == f"sglang.server_args.{name}"
    assert arguments(None, known={*KNOWN, name}, **sections)[name] == value


@pytest.mark.parametrize(("length", "refused"), [("4", True), ("-1", False), ("", False), ("x", False)])
def test_simulated_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch, length: str, refused: bool) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", length)
    with pytest.raises(ConfigError, match="SGLANG_SIMULATE_ACC_LEN") if refused else nullcontext():
        arguments(speculation={"method": "chain"})


@pytest.mark.parametrize(
    "tree",
    [
        {"sglang": {"tp_size": 2}},
        {"engine": {"kind": "sglang", "prefill_chunk": 512}},
        {"engine": {"kind": "sglang", "threads": 2}},
    ],
)
def test_keys_of_the_other_engine_are_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine"):
        load_config(tree, use_env=False)


def test_every_name_is_one_of_sglangs() -> None:
    require_sglang()
    from sglang.srt.server_args import ServerArgs

    known = set(ServerArgs.__dataclass_fields__)
    assert set(arguments()) | set(DECIDED) | FIXED | set(NOT_WITH_DRAFTS) <= known


def test_another_release_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.sglang_plugin.plugin.version", lambda name: "0.5.99")
    with pytest.raises(ConfigError, match=r"supports sglang 0\.5\.17, not 0\.5\.99; install the extra") as caught:
        prepare(load_config({"engine": {"kind": "sglang"}}, use_env=False))
    assert caught.value.param == "engine.kind"


@pytest.mark.parametrize("first", [False, True])
def test_the_spine_is_told_through_the_environment(first: bool) -> None:
    config = load_config({"speculation": {"spine_first": first}}, use_env=False)
    assert environment(config)["SGLANG_DDTREE_SPINE_FIRST"] == str(int(first))
