from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.errors import ModelFetchError
from serve_app.models import weights


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}, path)
    return path


def test_written_file_is_what_the_library_reads(tmp_path: Path) -> None:
    values = torch.randn(4, 6).to(torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    path = tmp_path / "x.safetensors"
    weights.write_bf16(path, {"a": (3, 6), "b": (6,)}, [bits[:10], bits[10:24]])
    read = load_file(path)
    assert torch.equal(read["a"], values[:3]) and torch.equal(read["b"], values[3])
    assert weights.read_header(path).keys() == {"a", "b"}


def test_too_little_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 bytes of tensors instead of 6"):
        weights.write_bf16(tmp_path / "x", {"a": (3,)}, [np.zeros(2, np.uint16)])


def test_header_of_the_librarys_file(file: Path) -> None:
    assert weights.read_header(file)["a"]["shape"] == [2, 3]


@pytest.mark.parametrize("size", [0, 4, 8, 60, -1, -9])
def test_truncated_file_is_an_error(file: Path, size: int) -> None:
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    with pytest.raises(ModelFetchError, match=r"damaged|incomplete"):
        weights.read_header(file)


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\4\0\0\0\0\0\0\0null", b"not a model at all"]
)
def test_other_files_are_an_error(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ModelFetchError, match="not a safetensors file"):
        weights.read_header(file)


def test_git_lfs_pointer_is_named(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelFetchError, match="git lfs pull"):
        weights.read_header(file)


def test_missing_shard_is_named(file: Path) -> None:
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    file.rename(file.with_name("model-1.safetensors"))
    (file.parent / weights.INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelFetchError, match=r"lacks model-2\.safetensors"):
        weights.check_directory(file.parent)


def test_damaged_index_is_an_error(file: Path) -> None:
    (file.parent / weights.INDEX).write_text('{"weight_map": [')
    with pytest.raises(ModelFetchError, match=r"index\.json is damaged"):
        weights.check_directory(file.parent)
