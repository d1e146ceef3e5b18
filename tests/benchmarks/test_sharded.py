"""More heads, the same function: of a model of the laptop's shape of heads, and of its drafter as shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import sharded
from serve_app.models.draft_reference import DraftReference
from tests.conftest import ROOT

SHIPPED = ROOT / "serve_app" / "models" / "smollm2_135m_dflash"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=72, intermediate_size=48, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).eval().save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "manifest.json").write_text("{}")
    return path


@pytest.mark.parametrize(("ranks", "heads", "groups"), [(2, 12, 4), (4, 12, 4), (8, 24, 8)])
@torch.no_grad()
def test_a_model_with_more_heads_is_the_same_function(
    model: Path, tmp_path: Path, ranks: int, heads: int, groups: int
) -> None:
    path = sharded.write(model, tmp_path / "more", ranks)
    more = LlamaForCausalLM.from_pretrained(path).eval()
    assert (more.config.num_attention_heads, more.config.num_key_value_heads) == (heads, groups)
    assert sharded.shards(path, ranks) and not sharded.shards(model, ranks)
    tokens = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(2))
    before = LlamaForCausalLM.from_pretrained(model).eval()(tokens).logits
    torch.testing.assert_close(more(tokens).logits, before, rtol=0, atol=1e-6)
    # It is not the model of the manifest any more.
    assert (path / "tokenizer.json").exists() and not (path / "manifest.json").exists()


@torch.no_grad()
def test_the_shipped_drafter_with_more_heads_drafts_the_same(tmp_path: Path) -> None:
    path = sharded.write(SHIPPED, tmp_path, 8)
    generator = torch.Generator().manual_seed(3)
    embedding, features = (torch.randn(n, m, generator=generator) for n, m in ((20, 576), (12, 5 * 576)))
    tokens, anchors = torch.randint(0, 20, (12,), generator=generator), torch.tensor([3, 11])
    drafters = [DraftReference.load(where, embedding, embedding) for where in (SHIPPED, path)]
    found = [next(drafter.logits(features, tokens, anchors)) for drafter in drafters]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4 * float(found[0].abs().max()))
    assert json.loads((path / "config.json").read_text())["num_attention_heads"] == 24


def test_what_shards_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    assert sharded.write_pair(model, SHIPPED, tmp_path, 3) == (model, SHIPPED)
    assert sharded.write_pair(model, SHIPPED, tmp_path, 2) == (tmp_path / "target", tmp_path / "drafter")
