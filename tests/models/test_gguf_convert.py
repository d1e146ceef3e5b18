from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

from serve_app.errors import ModelFetchError
from serve_app.models import gguf_convert
from tests.models import tiny

Report = Callable[[int, int], None]


@pytest.fixture
def converted(tiny_gguf: Path, tmp_path: Path, no_progress: Report) -> Path:
    gguf_convert.convert(tiny_gguf, tmp_path, no_progress)
    return tmp_path


def _naive(tensor: Any, heads: int | None) -> torch.Tensor:
    """Whole tensor at once through float32 and torch, rows moved one by one."""
    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if heads:
        size = len(values) // heads
        result = torch.empty_like(values)
        for head in range(heads):
            for pair in range(size // 2):
                for half in range(2):
                    result[head * size + half * (size // 2) + pair] = values[head * size + 2 * pair + half]
        values = result
    return values.to(torch.bfloat16)


def test_weights_equal_the_naive_conversion(converted: Path, tiny_gguf: Path) -> None:
    written = load_file(converted / "model.safetensors")
    tensors = {gguf_convert.hf_name(t.name): t for t in GGUFReader(tiny_gguf).tensors}
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        heads = tiny.HEADS if "q_proj" in name else tiny.KV_HEADS if "k_proj" in name else None
        assert torch.equal(written[name], _naive(tensor, heads)), name


def test_chunks_do_not_change_the_weights(
    converted: Path, tiny_gguf: Path, tmp_path: Path, no_progress: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "CHUNK_ELEMENTS", 3 * tiny.HIDDEN)
    again = tmp_path / "again"
    again.mkdir()
    gguf_convert.convert(tiny_gguf, again, no_progress)
    assert (again / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


def test_unpermute_puts_even_rows_of_each_head_first() -> None:
    assert gguf_convert.unpermute(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_transformers_loads_every_weight(converted: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_config_numbers(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "rms_norm_eps": 1e-5, "head_dim": 16}
    assert {key: config[key] for key in expected} == expected


def test_progress_reaches_the_total(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    gguf_convert.convert(tiny_gguf, tmp_path, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 2 * sum(int(np.prod(shape)) for shape in tiny.shapes().values())
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arch": "gemma"}, "llama architecture"),
        ({"pre": "llama-bpe"}, "gpt2/llama-bpe"),
        ({"skip": "blk.1.ffn_up.weight"}, "lacks 1 tensors, among them model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_models_it_does_not_know_are_refused(
    change: dict[str, str], says: str, tmp_path: Path, no_progress: Report
) -> None:
    gguf = tiny.write_gguf(tmp_path / "odd.gguf", **change)  # type: ignore[arg-type]
    with pytest.raises(ModelFetchError, match=says):
        gguf_convert.convert(gguf, tmp_path, no_progress)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 100])
def test_files_that_are_not_gguf_are_refused(content: bytes, tmp_path: Path, no_progress: Report) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelFetchError, match="not a GGUF file"):
        gguf_convert.convert(tmp_path / "x.gguf", tmp_path, no_progress)


def test_unknown_tensor_is_refused() -> None:
    with pytest.raises(ModelFetchError, match=r"blk\.0\.ssm_a\.weight"):
        gguf_convert.hf_name("blk.0.ssm_a.weight")


@pytest.mark.model
@pytest.mark.slow
def test_laptop_model_equals_transformers_own_conversion(laptop_model: Path, laptop_gguf: Path) -> None:
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        shell = LlamaForCausalLM(AutoConfig.from_pretrained(laptop_model))
    reference = load_gguf_checkpoint(str(laptop_gguf), return_tensors=True, model_to_load=shell)
    ours = load_file(laptop_model / "model.safetensors")
    assert ours.keys() == reference["tensors"].keys()
    assert [k for k, v in reference["tensors"].items() if not torch.equal(v.to(torch.bfloat16), ours[k])] == []
    config = json.loads((laptop_model / "config.json").read_text())
    theirs = {k: v for k, v in reference["config"].items() if k in config and k != "rms_norm_eps"}
    assert theirs == {k: config[k] for k in theirs}
