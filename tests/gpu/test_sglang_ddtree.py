"""DDTREE in SGLang on a GPU: the bring-up's answers, asserted. Needs SGLang, a checkpoint and a drafter.

MODEL=… DRAFTER=… tests/gpu/run_sglang.sh python3 -m pytest tests/gpu/test_sglang_ddtree.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from tests.gpu import checks
from tests.gpu.checks import NEAR_TIE
from tests.gpu.fleet import Fleet
from tests.gpu.sglang_bring_up import MODES, SEVERAL_GPUS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("DRAFTER" not in os.environ, reason="set MODEL and DRAFTER"),
]
TREES = ["ddtree", "page16", "wide", "prompts", "full", "plain", "deterministic", "flashinfer", "flashinfer16"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    out = Path(os.environ.get("OUT") or tmp_path_factory.mktemp("bring_up"))
    modes = f"{MODES},{SEVERAL_GPUS}" if torch.cuda.device_count() > 1 else MODES
    fleet = Fleet(
        argparse.Namespace(
            model=Path(os.environ["MODEL"]), drafter=Path(os.environ["DRAFTER"]), out=out, modes=modes,
            seconds=float(os.environ.get("SECONDS_LIMIT", "800")), prompts=100, tokens=128, ready=400,
            stagger=float(os.environ.get("STAGGER_SECONDS", "20")),
            soak=float(os.environ.get("SOAK_SECONDS", "240")),
        )
    )  # fmt: skip
    try:
        run(fleet)
        yield fleet.report["stages"]
    finally:
        fleet.close()


def explained(found: dict[str, Any], dtype: str = "float16") -> bool:
    """Whether every difference begins where the reference itself was all but undecided between the two tokens."""
    gaps = [entry.get("gap") for entry in found["differing"]]
    return len(gaps) == found["of"] - found["equal"] and all(g is not None and abs(g) < NEAR_TIE[dtype] for g in gaps)


def fallbacks(counts: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in counts.items() if key.startswith("ddtree_graph_fallbacks_total")}


@pytest.mark.parametrize("name", [*TREES, "eager", "dflash-full"])
def test_greedy_tokens_are_ars(stages: dict[str, Any], name: str) -> None:
    found = stages[f"{name} identity"]
    assert explained(found), found
    assert found["equal"] >= 0.4 * found["of"]


def test_greedy_tokens_in_bfloat16_part_at_near_ties(stages: dict[str, Any]) -> None:
    assert explained(stages["bf16 identity"], "bfloat16")


def test_latent_attention_gives_ars_tokens(stages: dict[str, Any]) -> None:
    assert explained(stages["mla identity"]) and stages["mla identity"]["acceptance_length"] > 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_ranks_give_ars_tokens(stages: dict[str, Any]) -> None:
    assert explained(stages["mla ranks"], "bfloat16") and stages["mla ranks"]["acceptance_length"] > 1
    found = stages["ranks"]
    assert explained(found) and found["equal"] >= 0.4 * found["of"] and not fallbacks(found["counters"])
    # As many drafts are accepted as by one rank.
    one = stages["ddtree identity"]["acceptance_length"]
    assert found["acceptance_length"] == pytest.approx(one, rel=0.05)


def test_a_chain_is_dflash(stages: dict[str, Any]) -> None:
    ours, theirs = dict(stages["chain identity"]), dict(stages["dflash identity"])
    # Which requests share a batch decides between drafts that are all but equal, for DFLASH itself from run to run.
    lengths = [found.pop("acceptance_length") for found in (ours, theirs)]
    assert ours == theirs, "the same tokens, differing from AR's at the same places"
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-3)


def test_a_tree_accepts_more_than_the_chain(stages: dict[str, Any]) -> None:
    assert stages["wide identity"]["acceptance_length"] > 1.2 * stages["dflash identity"]["acceptance_length"]


def test_graph_and_eager_give_the_same(stages: dict[str, Any]) -> None:
    assert explained(stages["ddtree alone"]) and explained(stages["eager identity"])
    assert explained(stages["graph and eager"]) and stages["graph and eager"]["equal"] >= 3


def test_every_batch_size(stages: dict[str, Any]) -> None:
    assert all(explained(found) for found in stages["ddtree batch sizes"].values())


def test_steady_state_has_no_fallbacks(stages: dict[str, Any]) -> None:
    counts = stages["ddtree steady counters"]
    assert not fallbacks(counts)
    assert all(counts[f"ddtree_graph_replays_total{{role={role}}}"] > 0 for role in ("target", "draft"))


@pytest.mark.skipif(os.environ.get("SGLANG_DDTREE_DIRECT_REPLAY") == "0", reason="SGLang is to prepare every replay")
def test_steady_greedy_steps_are_replayed_directly(stages: dict[str, Any]) -> None:
    counts = stages["ddtree steady counters"]
    found = {key: value for key, value in counts.items() if key.startswith("ddtree_step_preparations_total")}
    assert set(found) == {"ddtree_step_preparations_total{how=direct}"}


def test_a_batch_beyond_the_graphs_is_counted_with_that_reason(stages: dict[str, Any]) -> None:
    found = fallbacks(stages["ddtree counters"])
    wanted = {f"ddtree_graph_fallbacks_total{{reason=bs_exceeds_max,role={role}}}" for role in ("target", "draft")}
    assert set(found) == wanted and len(set(found.values())) == 1


def test_an_engine_without_graphs_counts_every_forward(stages: dict[str, Any]) -> None:
    counts = stages["eager counters"]
    assert set(fallbacks(counts)) == {
        "ddtree_graph_fallbacks_total{reason=no_runner,role=target}",
        "ddtree_graph_fallbacks_total{reason=eager_runner,role=draft}",
    }
    assert not any(key.startswith("ddtree_graph_replays_total") for key in counts)


@pytest.mark.parametrize("name", ["ddtree", "page16", "prompts", "full"])
def test_prompts_at_the_end_of_the_context(stages: dict[str, Any], name: str) -> None:
    found = stages[f"{name} context end"]
    assert explained(found) and found["lengths"] == [room - 2 for room in found["rooms"]]


@pytest.mark.parametrize("name", ["ddtree", "page16", "prompts", "full"])
def test_cached_prefixes(stages: dict[str, Any], name: str) -> None:
    found = stages[f"{name} prefix cache"]
    assert all(explained(turn) for turn in found["turns"]) and min(found["least cached"]) >= 16


def test_logprobs_are_ars(stages: dict[str, Any]) -> None:
    found = stages["logprobs"]
    assert found["tokens"] > 300 and found["largest"] < 0.05 and found["largest of top 5"] < NEAR_TIE["float16"]
    assert all(tokens == values == tops for tokens, values, tops in found["counts"])


def test_limits_and_stops_cut_inside_an_accepted_block(stages: dict[str, Any]) -> None:
    found = stages["limits"]
    assert all(given == [int(asked)] for asked, given in found["max_new_tokens"].items())
    assert all(one["same"] >= one["of"] - 4 and one["stopped"] for one in found["stops"].values()), found
    assert explained(found["every limit"]) and 0 < found["every limit"]["stopped"] < found["every limit"]["of"]


def test_grammars(stages: dict[str, Any]) -> None:
    found = stages["grammars"]
    assert all(explained(found[kind]) for kind in ("json", "regex", "mixed"))
    assert all(re.fullmatch(checks.REGEX, text) for text in found["regex"]["texts"])
    for text in found["json"]["texts"]:
        answer = json.loads(text)
        assert set(answer) == {"name", "age"} and answer["age"] <= 99


@pytest.mark.parametrize("filters", ["top-k", "mixed"])
def test_samples_follow_ars_law(stages: dict[str, Any], filters: str) -> None:
    theirs, ours = (Counter(counts) for counts in stages["law"][filters])
    assert ours.pop("greedy") == theirs.pop("greedy") == 1
    cells = sorted(set(ours) | set(theirs), key=lambda path: -(ours[path] + theirs[path]))
    common = [path for path in cells if ours[path] + theirs[path] >= 10]
    rest = [sum(counts[path] for path in cells if path not in common) for counts in (ours, theirs)]
    table = [[counts[path] for path in common] for counts in (ours, theirs)]
    if sum(rest) >= 10:
        table = [[*row, left] for row, left in zip(table, rest, strict=True)]
    assert len(table[0]) > 4 and chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(
    "name", ["soak", "ddtree traffic", "page16 traffic", "prompts traffic", "full traffic", "flashinfer16 traffic"]
)
def test_traffic_with_aborts_leaves_nothing_behind(stages: dict[str, Any], name: str) -> None:
    found = stages[name]
    assert found["pool"]["sglang:kv_used_tokens"] == 0
    left = found["pool"]["sglang:kv_available_tokens"] + found["pool"]["sglang:kv_evictable_tokens"]
    assert left == found["pool"]["sglang:max_total_num_tokens"]
    ended = {key: n for key, n in found["counts"].items() if not key.startswith("asked")}
    assert set(ended) == {"stop", "length", "abort"}
    assert sum(ended.values()) == sum(n for key, n in found["counts"].items() if key.startswith("asked"))
    assert explained(found["afterwards"])


def test_the_soak_was_long_and_without_fallbacks(stages: dict[str, Any]) -> None:
    assert stages["soak"]["forwards"] >= 20_000 and not stages["soak"]["fallbacks"]


def test_the_drafter_is_the_embedded_engines(stages: dict[str, Any]) -> None:
    found = stages["drafter parity"]
    assert found["drafts"] >= 10 and found["hidden"] < 0.02 and found["logits"] < 0.02
    assert found["same best token"] >= 0.97 * found["rows"]
