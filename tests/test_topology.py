"""What is wrong with a node, as a pure function of what it has; and the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import Config, load_config
from serve_app.errors import ConfigError
from serve_app.topology import Gpu, NodeFacts, mismatches, missing_files, missing_models, preflight, read_node

GOOD = NodeFacts(
    gpus=(Gpu("NVIDIA B300 SXM6 AC", 268, 267),) * 8, driver="580.95.05", cuda="13.0", memory_gib=900, shm_gib=64
)


def config(**placement: Any) -> Config:
    asked = {"whole_node": True, "accelerator_type": "B300", "preflight": True, **placement}
    return load_config({"replica": {"num_gpus": 8}, "placement": asked}, use_env=False)


def wrong(facts: NodeFacts, **placement: Any) -> list[str]:
    return mismatches(facts, config(**placement).placement, 8)


def test_the_right_node_has_no_mismatch() -> None:
    asked = {"min_driver": "580.65", "min_cuda": "13.0", "min_shm_gib": 16, "min_memory_gib": 500}
    assert wrong(GOOD, min_gpu_free_gib=200, **asked) == []


@pytest.mark.parametrize(
    ("change", "placement", "said"),
    [
        ({"gpus": GOOD.gpus[:7]}, {}, "7 GPUs"),
        ({"gpus": GOOD.gpus * 2}, {}, "16 GPUs"),
        ({"gpus": (*GOOD.gpus[:7], Gpu("NVIDIA H200", 140, 140))}, {}, "NVIDIA H200 instead of B300"),
        ({}, {"gpu_name": "H200"}, "instead of H200"),
        ({"gpus": (*GOOD.gpus[:7], Gpu("NVIDIA B300", 268, 12))}, {"min_gpu_free_gib": 200}, "7 (12.0)"),
        ({"unlinked": ((0, 5), (1, 5))}, {}, "2 pairs of GPUs: 0-5, 1-5"),
        ({"driver": "570.1"}, {"min_driver": "580.65"}, "driver 570.1 is older"),
        ({"driver": ""}, {"min_driver": "580.65"}, "driver missing"),
        ({"cuda": "12.9"}, {"min_cuda": "13.0"}, "CUDA 12.9 is older"),
        ({"shm_gib": 0.06}, {"min_shm_gib": 16}, "/dev/shm has 0.1 GiB"),
        ({"memory_gib": 10}, {"min_memory_gib": 500}, "memory has 10.0 GiB"),
        ({"problem": "no driver"}, {}, "cannot be read: no driver"),
    ],
)
def test_each_mismatch_is_said(change: dict[str, Any], placement: dict[str, Any], said: str) -> None:
    (sentence,) = wrong(replace(GOOD, **change), **placement)
    assert said in sentence


def test_versions_compare_as_numbers() -> None:
    assert wrong(replace(GOOD, driver="1000.2"), min_driver="999.65") == []


def test_nvlink_may_be_waived() -> None:
    assert wrong(replace(GOOD, unlinked=((0, 1),)), nvlink=False) == []


def test_without_gpus_asked_for_none_are_looked_at() -> None:
    assert mismatches(NodeFacts(problem="no driver"), Config().placement, 0) == []


def test_every_mismatch_is_in_the_one_error() -> None:
    facts = replace(GOOD, gpus=GOOD.gpus[:4], shm_gib=1)
    with pytest.raises(ConfigError, match=r"4 GPUs.*; /dev/shm") as caught:
        preflight(config(min_shm_gib=16), lambda: facts)
    assert caught.value.param == "placement"


def test_no_check_is_made_unless_asked_for() -> None:
    preflight(config(preflight=False), lambda: NodeFacts(problem="no driver"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_whole_model_lacks_nothing(model: Path) -> None:
    assert missing_files(str(model), True) == []


@pytest.mark.parametrize("damage", ["b.safetensors", "config.json"])
def test_a_missing_file_is_named(model: Path, damage: str) -> None:
    (model / damage).unlink()
    (sentence,) = missing_files(str(model), True)
    assert damage in sentence


def test_an_empty_file_counts_as_missing(model: Path) -> None:
    (model / "a.safetensors").write_bytes(b"")
    assert "a.safetensors" in missing_files(str(model), True)[0]


@pytest.mark.parametrize(
    ("source", "required", "problems"), [("org/model", False, 0), ("org/model", True, 1), ("/no/such", False, 1)]
)
def test_a_source_elsewhere_is_fetched_unless_it_must_be_here(source: str, required: bool, problems: int) -> None:
    assert len(missing_files(source, required)) == problems


@pytest.mark.parametrize(("drafter", "method", "problems"), [
    ("/no/such", "ddtree", 1), ("/no/such", "none", 0), ("auto", "ddtree", 0), (None, "ddtree", 0),
])  # fmt: skip
def test_the_drafters_directory_is_looked_at_where_it_drafts(
    model: Path, drafter: str | None, method: str, problems: int
) -> None:
    tree = {"model": {"source": str(model), "drafter": drafter}, "speculation": {"method": method}}
    found = missing_models(load_config(tree, use_env=False))
    assert len(found) == problems and all("model.drafter" in sentence for sentence in found)


def test_this_machine_can_be_read() -> None:
    facts = read_node()
    assert facts.memory_gib > 0 and (facts.gpus or facts.problem)


def test_the_command_says_what_is_missing() -> None:
    env = {"DDTREE_PLACEMENT__MIN_MEMORY_GIB": "1000000", "PATH": ""}
    command = [sys.executable, "-m", "serve_app.topology"]
    done = subprocess.run(
        command, env=env, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "mismatch: memory has" in done.stderr
    assert json.loads(done.stdout)["memory_gib"] > 0
