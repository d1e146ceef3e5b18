"""DDTREE in SGLang on a GPU: the bring-up's answers, asserted. Needs SGLang, a checkpoint and a drafter.

MODEL=… DRAFTER=… tests/gpu/run_sglang.sh python3 -m pytest tests/gpu/test_sglang_ddtree.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.sglang_bring_up import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("DRAFTER" not in os.environ, reason="set MODEL and DRAFTER"),
]
MODES = "ar,ddtree,dflash,ddtree-64,ddtree-chain,ddtree-plain,ddtree-eager"
TREES = ["ddtree", "ddtree-64", "ddtree-chain", "ddtree-plain"]
# Log-prob gap of AR's two best tokens below which one bf16 rounding may decide.
NEAR_TIE = 0.15


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    out = Path(os.environ.get("OUT") or tmp_path_factory.mktemp("bring_up"))
    run = Run(
        argparse.Namespace(
            model=Path(os.environ["MODEL"]), drafter=Path(os.environ["DRAFTER"]), out=out, modes=MODES,
            seconds=float(os.environ.get("SECONDS_LIMIT", "600")), prompts=100, tokens=128, stagger=45,
        )
    )  # fmt: skip
    try:
        run.all()
        yield run.report["stages"]
    finally:
        for child in run.children.values():
            child.close()


def explained(found: dict[str, Any]) -> bool:
    """Whether every difference begins where AR itself was all but undecided between the two tokens."""
    gaps = [(entry.get("ar") or {}).get("gap") for entry in found["differing"]]
    return len(gaps) == found["of"] - found["equal"] and all(gap is not None and abs(gap) < NEAR_TIE for gap in gaps)


@pytest.mark.parametrize("name", [*TREES, "ddtree-eager"])
def test_greedy_tokens_are_ars(stages: dict[str, Any], name: str) -> None:
    found = stages[f"{name} identity" if name in TREES else f"{name} identity, first"]
    assert explained(found), found


@pytest.mark.parametrize("name", TREES)
def test_steady_state_has_no_fallbacks(stages: dict[str, Any], name: str) -> None:
    counts = stages[f"{name} metrics"]
    assert sum(v for k, v in counts.items() if k.startswith("ddtree_graph_fallbacks_total")) == 0
    assert all(counts[f"ddtree_graph_replays_total{{role={role}}}"] > 0 for role in ("target", "draft"))


def test_a_chain_accepts_what_dflash_does(stages: dict[str, Any]) -> None:
    ours, theirs = (stages[f"{name} identity"]["acceptance_length"] for name in ("ddtree-chain", "dflash"))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_a_tree_accepts_more_than_the_chain(stages: dict[str, Any]) -> None:
    assert stages["ddtree identity"]["acceptance_length"] > 1.15 * stages["dflash identity"]["acceptance_length"]


def test_greedy_requests_stay_greedy_beside_sampled_ones(stages: dict[str, Any]) -> None:
    assert stages["ddtree sampled"]["distinct greedy"] == 1 and stages["ddtree sampled"]["distinct sampled"] > 1


def test_logprobs_are_ars(stages: dict[str, Any]) -> None:
    found = stages["ddtree logprobs"]
    assert found["tokens compared"] > 50 and found["largest difference"] < 0.2
    assert all(tokens == values == tops for tokens, values, tops in found["counts"])


def test_limits_cut_inside_an_accepted_block(stages: dict[str, Any]) -> None:
    found = stages["ddtree limits"]
    assert all(int(asked) == given for asked, given in found["max_new_tokens"].items())
    assert " the" not in found["stop"]
