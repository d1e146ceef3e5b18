from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_app.errors import ModelFetchError
from serve_app.models import ModelFiles, drafter, resolve, resolve_drafter

TARGET = {"hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 4}
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 1,
    "num_attention_heads": 4, "block_size": 16, "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 16, "target_layer_ids": [0, 3]},
}  # fmt: skip
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def target(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TARGET))
    return ModelFiles(path, "some-model")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(DRAFTER))
    save_file({"fc.weight": torch.zeros(1)}, path / "model.safetensors")
    return path


def test_none_drafts_nothing(target: ModelFiles) -> None:
    assert resolve_drafter(None, target) is None


def test_auto_without_a_shipped_drafter_is_none_and_logged(
    target: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "serve_app.models"):
        assert resolve_drafter("auto", target) is None
    assert "no drafter is shipped for some-model" in caplog.text


def test_explicit_directory(target: ModelFiles, draft: Path) -> None:
    assert resolve_drafter(str(draft), target) == draft


@pytest.mark.parametrize(
    ("source", "says"), [("/no/such", "does not exist"), ("nonsense", "neither a known model"), (__file__, "is a file")]
)
def test_explicit_source_that_leads_nowhere(source: str, says: str, target: ModelFiles) -> None:
    with pytest.raises(ModelFetchError, match=says):
        resolve_drafter(source, target)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "is not a drafter"),
        (lambda c: c.pop("architectures"), "is not a drafter"),
        (lambda c: c.pop("dflash_config"), "dflash_config is missing"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), r"dflash_config\.mask_token_id must"),
        (lambda c: c["dflash_config"].update(mask_token_id=300), "outside the vocabulary"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[]), "target_layer_ids must"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 4]), "has layer 4, but the target has 4"),
        (lambda c: c.update(block_size=1), "block_size"),
        (lambda c: c.update(block_size=True), "block_size"),
        (lambda c: c.pop("hidden_size"), "hidden_size must"),
        (lambda c: c.update(hidden_size=128), "hidden_size is 128, but the target's is 64"),
        (lambda c: c.update(vocab_size=299), "vocab_size is 299, but the target's is 300"),
        (lambda c: c.update(num_target_layers=30), "num_target_layers is 30, but the target has 4"),
    ],
)
def test_drafter_that_does_not_fit(target: ModelFiles, draft: Path, change: Change, says: str) -> None:
    config = json.loads(json.dumps(DRAFTER))
    change(config)
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFetchError, match=says):
        resolve_drafter(str(draft), target)


def test_multimodal_target_keeps_its_numbers_one_level_down(target: ModelFiles, draft: Path) -> None:
    (target.path / "config.json").write_text(json.dumps({"text_config": {**TARGET, "hidden_size": 128}}))
    with pytest.raises(ModelFetchError, match="the target's is 128"):
        resolve_drafter(str(draft), target)


def test_drafter_with_a_truncated_file(target: ModelFiles, draft: Path) -> None:
    os.truncate(draft / "model.safetensors", 70)
    with pytest.raises(ModelFetchError, match=r"model\.safetensors"):
        resolve_drafter(str(draft), target)


@pytest.mark.model
def test_the_laptop_models_drafter_fits(laptop_model: Path) -> None:
    """The shipped one, or another in its place (`DDTREE_TEST_DRAFTER`, a directory)."""
    target = resolve(str(laptop_model))
    source = os.environ.get("DDTREE_TEST_DRAFTER") or ("auto" if drafter.shipped("smollm2-135m") else "")
    if not source:
        pytest.skip("no drafter is shipped in this tree")
    assert resolve_drafter(source, target) is not None
