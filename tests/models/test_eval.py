"""`serve_app.models eval` on a random model of a few thousand weights, against decoding block by block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.errors import ModelFetchError
from serve_app.models import eval as evaluation
from serve_app.models.draft_reference import DraftReference
from serve_app.models.gguf_convert import convert
from tests.models import tiny

BLOCK, LAYERS = 4, 2


def drafter_config(hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "num_hidden_layers": LAYERS,
        "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "block_size": BLOCK,
        "tie_word_embeddings": True, "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0]},
    }  # fmt: skip


def write_drafter(path: Path, hidden: int, vocab: int) -> Path:
    """A drafter with random weights."""
    path.mkdir()
    config = drafter_config(hidden, vocab)
    (path / "config.json").write_text(json.dumps(config))
    gen = torch.Generator().manual_seed(0)
    weights = {"fc.weight": (hidden, hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(LAYERS):
        name = f"layers.{i}."
        weights |= {f"{name}self_attn.{p}_proj.weight": (hidden // (1 if p == "q" else 2), hidden) for p in "qkv"}
        weights |= {f"{name}self_attn.o_proj.weight": (hidden, hidden), f"{name}mlp.down_proj.weight": (hidden, 48)}
        weights |= {f"{name}mlp.{p}_proj.weight": (48, hidden) for p in ("gate", "up")}
        weights |= {f"{name}self_attn.{p}_norm.weight": (hidden // 4,) for p in "qk"}
        weights |= {f"{name}{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    save_file({k: torch.randn(s, generator=gen) * 0.4 for k, s in weights.items()}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=None, bos_token_id=1, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def drafter(model: Any, tmp_path: Path) -> DraftReference:
    path = write_drafter(tmp_path / "drafter", 32, 24)
    return DraftReference.load(path, model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach())


@torch.no_grad()
def serve_by_chain(model: Any, drafter: DraftReference, prompt: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding, recomputing everything each step: (reply, tokens committed by each step)."""
    states = model(torch.tensor([prompt]), output_hidden_states=True)
    reply, steps = [int(states.logits[0, -1].argmax())], []
    while len(reply) < limit:
        tokens = torch.tensor(prompt + reply)
        features = model(tokens[None], output_hidden_states=True).hidden_states[1][0]
        logits = next(drafter.logits(features, tokens, torch.tensor([len(tokens) - 1])))
        draft = logits[0].argmax(-1).tolist()
        said = model(torch.tensor([prompt + reply + draft])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        kept = next((i for i, token in enumerate(draft) if token != said[i]), len(draft))
        new = said[: kept + 1][: limit - len(reply)]
        reply += new
        steps.append(len(new))
    return reply, steps


def test_the_walk_commits_what_greedy_speculative_decoding_commits(model: Any, drafter: DraftReference) -> None:
    prompt = [1, 7, 9, 4]
    reply, steps = serve_by_chain(model, drafter, prompt, 40)
    assert reply == evaluation.answer(model, prompt, set(), 0.0, 40)
    lengths = evaluation.measure(model, drafter, evaluation.Answer("x", prompt, reply), (8,))["chain"]
    tally = evaluation.Tally(BLOCK - 1)
    tally.add(lengths)
    assert (tally.tokens, tally.steps) == (sum(steps), len(steps))
    assert max(lengths) > 1, "a drafter that never hits would make this test empty"


def test_marginals_depend_on_nothing_behind_the_anchor(model: Any, drafter: DraftReference) -> None:
    tokens = torch.randint(3, 24, (20,))
    features = torch.randn(20, 32)
    anchors = torch.tensor([6, 11])
    before = torch.cat(list(drafter.logits(features, tokens, anchors)))
    features[11:], tokens[12:] = 7.0, 3
    torch.testing.assert_close(torch.cat(list(drafter.logits(features, tokens, anchors))), before)


def test_an_answer_of_one_token_has_no_step(model: Any, drafter: DraftReference) -> None:
    assert evaluation.measure(model, drafter, evaluation.Answer("x", [1, 5], [2]), (8,)) == {"chain": [], "tree 8": []}


def test_a_drafter_of_another_size_is_refused(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "other", 64, 24)
    with pytest.raises(ModelFetchError, match="hidden size is 64, the target's 32"):
        DraftReference.load(path, torch.zeros(24, 32), torch.zeros(24, 32))


def test_report_and_plot_from_the_command_line(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    convert(tiny.write_gguf(tmp_path / "tiny.gguf"), target, lambda done, total: None)
    write_drafter(tmp_path / "draft", tiny.HIDDEN, len(tiny.vocabulary()))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(
        json.dumps([{"kind": k, "messages": [{"role": "user", "content": k}]} for k in ("hello", "help")])
    )
    out, png = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--model", str(target), "--drafter", f"random={tmp_path / 'draft'}", "--prompts", str(prompts)]
    arguments += ["--new-tokens", "12", "--budgets", "4", "8", "--dtype", "float32", "--out", str(out)]
    plotted = bool(pytest.importorskip("matplotlib"))
    assert evaluation.main([*arguments, *(["--plot", str(png)] if plotted else [])]) == 0
    report = json.loads(out.read_text())
    assert [(r["drafter"], r["temperature"]) for r in report["results"]] == [("random", 0.0), ("random", 0.8)]
    assert set(report["results"][0]["acceptance_length"]) == {"chain", "tree 4", "tree 8"}
    assert set(report["results"][0]["chain_by_kind"]) == {"hello", "help"}
    assert png.stat().st_size > 5000


@pytest.mark.parametrize("option", ["--model", "--drafter"])
def test_what_is_not_there_is_one_line(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And said before a target is loaded."""
    convert(tiny.write_gguf(tmp_path / "tiny.gguf"), tmp_path, lambda done, total: None)
    assert evaluation.main(["--model", str(tmp_path), option, "/no/such"]) == 1
    assert capsys.readouterr().err.splitlines() == ["error: /no/such does not exist"]


@pytest.mark.parametrize(
    "arguments", [("--every", "0"), ("--budgets", "-1"), ("--dtype", "int3"), ("--new-tokens", "x")]
)
def test_wrong_options_are_usage(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        evaluation.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_the_prompts_are_many_and_distinct() -> None:
    items = json.loads(evaluation.PROMPTS.read_text())
    assert len(items) >= 200
    assert len({json.dumps(i["messages"]) for i in items}) == len(items)
    assert all(i["messages"][-1]["role"] == "user" for i in items)
