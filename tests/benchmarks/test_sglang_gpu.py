"""The GPU benchmark's bookkeeping with engines of known speed in the place of SGLang's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import random_llama, sglang_gpu


class Engine:
    """Takes `step_s` a step and `accepted` tokens of every one; each third forward falls back if `falls`."""

    def __init__(self, step_s: float, accepted: int, *, falls: bool = False, dies_at: int = 10**9) -> None:
        self.step_s, self.accepted, self.falls, self.dies_at = step_s, accepted, falls, dies_at
        self.asked: list[list[str]] = []
        self.closed = False

    def ask(self, do: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        if do == "metrics":
            return {"metrics": {"ddtree_graph_fallbacks_total{role=target}": len(self.asked) if self.falls else 0.0}}
        self.asked.append(fields["prompts"])
        if len(self.asked) >= self.dies_at:
            raise RuntimeError("gone")
        steps = -(-fields["params"]["max_new_tokens"] // self.accepted)
        speculates = self.accepted > 1
        return {
            "seconds": steps * self.step_s, "tokens": len(fields["prompts"]) * fields["params"]["max_new_tokens"],
            "verify_steps": steps * len(fields["prompts"]) * speculates, "longest_steps": steps * speculates,
        }  # fmt: skip

    def close(self) -> None:
        self.closed = True


def rounds(children: dict[str, Any], batch: int, out: Path, left: float = 1000) -> dict[str, Any]:
    result: dict[str, Any] = {"runs": []}
    arguments = argparse.Namespace(rounds=3, tokens=96, out=out)
    sglang_gpu.rounds(result, children, batch, arguments, sglang_gpu.time.monotonic() + left)
    return result


def test_every_mode_takes_turns_at_the_same_prompts(tmp_path: Path) -> None:
    children = {"ar": Engine(0.002, 1), "ddtree-32": Engine(0.003, 4)}
    runs = {run["mode"]: run for run in rounds(children, 4, tmp_path / "r.json")["runs"]}
    assert children["ar"].asked == children["ddtree-32"].asked
    once = [prompt for group in children["ar"].asked[1:] for prompt in group]
    assert len(once) == len(set(once)) == 32, "one group to warm up, then all prompts once"
    assert runs["ddtree"]["budget"] == 32 and runs["ddtree"]["batch"] == 4
    assert runs["ar"]["step_ms"] == pytest.approx(2.0) and runs["ddtree"]["step_ms"] == pytest.approx(3.0)
    assert runs["ar"]["acceptance_length"] == 1.0 and runs["ddtree"]["acceptance_length"] == pytest.approx(4.0)
    assert runs["ar"]["tok_s"] == pytest.approx(4 / 0.002) and runs["ar"]["tok_s_per_request"] == pytest.approx(500)
    assert len(runs["ar"]["tok_s_of_rounds"]) == 3


def test_fallbacks_are_those_of_the_run(tmp_path: Path) -> None:
    children = {"ddtree-8": Engine(0.003, 2, falls=True)}
    first = rounds(children, 8, tmp_path / "r.json")["runs"][0]
    second = rounds(children, 8, tmp_path / "r.json")["runs"][0]
    assert first["fallbacks"] == second["fallbacks"] == 5


def test_an_engine_that_dies_costs_the_others_nothing(tmp_path: Path) -> None:
    children: dict[str, Any] = {"ar": Engine(0.002, 1), "dflash": Engine(0.002, 3, dies_at=3)}
    died = children["dflash"]
    result = rounds(children, 2, tmp_path / "r.json")
    assert [run["mode"] for run in result["runs"]] == ["ar"]
    assert "gone" in result["failed"]["dflash"] and died.closed and list(children) == ["ar"]


def test_without_time_nothing_is_half_reported(tmp_path: Path) -> None:
    assert rounds({"ar": Engine(0.002, 1)}, 1, tmp_path / "r.json", left=5)["runs"] == []


def test_the_random_model_shards_by_eight_and_has_the_size_it_says(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    target, drafter = random_llama.write(tmp_path, tmp_path / "from")
    config, draft = AutoConfig.from_pretrained(target), json.loads((drafter / "config.json").read_text())
    assert 7.3e9 < random_llama.parameters() < 8.6e9 and (target / "tokenizer.json").exists()
    for field in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size", "hidden_size"):
        assert getattr(config, field) % 8 == 0 and draft[field] % 8 == 0
    assert max(draft["dflash_config"]["target_layer_ids"]) < config.num_hidden_layers == draft["num_target_layers"]


def test_a_modes_switches_are_variables_and_server_arguments(tmp_path: Path) -> None:
    name = "ddtree-15:DIRECT_REPLAY=0:speculative_eagle_topk=1:attention_backend=flashinfer:disable_cuda_graph=true"
    assert sglang_gpu.switches(name) == {"SGLANG_DDTREE_DIRECT_REPLAY": "0"}
    assert sglang_gpu.server_arguments(name) == {
        "speculative_eagle_topk": 1, "attention_backend": "flashinfer", "disable_cuda_graph": True
    }  # fmt: skip
    run = rounds({name: Engine(0.003, 4)}, 4, tmp_path / "r.json")["runs"][0]
    assert (run["mode"], run["budget"], run["switches"]) == ("ddtree", 15, name.partition(":")[2])
