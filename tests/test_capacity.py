"""The calculator's formulas, against numbers worked out by hand and against what must hold of any plan."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.capacity import (
    GIB,
    HELP,
    MODELS,
    Model,
    Plan,
    features_bytes,
    kv_bytes,
    kv_indices_bytes,
    logits_bytes,
    main,
    mask_bytes,
    memory,
    rates,
)

KIMI = MODELS["kimi-k2.6"]
DENSE = Model(weights=16 * GIB, layers=32, hidden=4096, vocab=100, kv_heads=8, head_dim=128)
PLAN = Plan(
    gpus=2, gpu_gib=40, usable=0.5, replicas=3, budget=7, slots=4, context=1000, graphs_gib=2, tokens=500, answer=100,
    acceptance=2, step_ms=20, think_s=9, chunk_us=1000, sampled=False,
)  # fmt: skip


def test_keys_and_values_of_heads_are_spread_over_gpus() -> None:
    assert kv_bytes(DENSE, 1) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes(DENSE, 2) == kv_bytes(DENSE, 1) // 2


def test_a_head_is_never_split() -> None:
    assert kv_bytes(DENSE, 16) == kv_bytes(DENSE, 8) == 2 * 32 * 128 * 2


def test_a_latent_cache_is_whole_on_every_gpu() -> None:
    alone = replace(KIMI, draft_layers=0)
    assert kv_bytes(alone, 8) == kv_bytes(alone, 1) == 61 * 576 * 2 == 70272


def test_the_drafter_keeps_keys_and_values_too() -> None:
    assert kv_bytes(KIMI, 8) - kv_bytes(replace(KIMI, draft_layers=0), 8) == 2 * 6 * 1 * 128 * 2


def test_logits_are_one_row_per_node_and_root() -> None:
    assert logits_bytes(DENSE, PLAN) == 4 * 8 * 100 * 4


def test_sampling_holds_four_copies_more() -> None:
    assert logits_bytes(DENSE, replace(PLAN, sampled=True)) == 5 * logits_bytes(DENSE, PLAN)


def test_the_mask_sees_context_and_tree() -> None:
    assert mask_bytes(PLAN) == 4 * 8 * 1008


def test_indices_are_one_row_per_request() -> None:
    assert kv_indices_bytes(PLAN) == 4 * 1000 * 8


def test_features_are_of_every_row_and_layer() -> None:
    assert features_bytes(DENSE, PLAN) == 4 * 8 * 5 * 4096 * 2


def test_what_is_left_becomes_keys_and_values() -> None:
    found = memory(DENSE, PLAN)
    buffers = sum(f(DENSE, PLAN) for f in (logits_bytes, features_bytes)) + mask_bytes(PLAN) + kv_indices_bytes(PLAN)
    # 40 GiB × 0.5, less 8 of weights and 2 of graphs.
    left = 10 * GIB - buffers
    assert found.left == pytest.approx(left / GIB)
    assert found.kv_tokens == left // kv_bytes(DENSE, 2)


def test_rates_by_hand() -> None:
    found = rates(DENSE, PLAN)
    # 3 replicas × 4 slots; 2 tokens per 20 ms; 100 tokens take 1 s; 12 answers/s; each user asks every 10 s.
    assert (found.running, found.tokens_per_s_per_request, found.itl_ms, found.answer_s) == (12, 100, 10, 1)
    assert (found.tokens_per_s, found.answers_per_s, found.users) == (1200, 12, 120)


def test_an_ingress_process_takes_sixty_percent_of_a_core() -> None:
    found = rates(DENSE, replace(PLAN, replicas=10))
    # 40 requests × 50 chunks/s × 1 ms.
    assert found.ingress_cores == pytest.approx(2.0) and found.ingress_replicas == 4


def test_there_are_always_two_ingress_processes() -> None:
    assert rates(DENSE, replace(PLAN, replicas=1, slots=1)).ingress_replicas == 2


def test_memory_may_bound_the_batch() -> None:
    small = replace(PLAN, gpu_gib=21, slots=1000, tokens=1000, context=1000)
    assert 0 < rates(DENSE, small).running < 3 * 1000


def test_kimi_fits_eight_b300() -> None:
    assert memory(KIMI, Plan()).kv_tokens > 32 * 8192


def test_kimi_does_not_fit_four_h100() -> None:
    assert memory(KIMI, Plan(gpus=4, gpu_gib=80)).kv_tokens == 0


@given(st.integers(1, 64), st.integers(0, 127), st.sampled_from([1, 2, 4, 8]))
def test_more_slots_or_nodes_never_leave_more_memory(slots: int, budget: int, gpus: int) -> None:
    plan = Plan(slots=slots, budget=budget, gpus=gpus)
    left = memory(KIMI, plan).left
    assert memory(KIMI, replace(plan, slots=slots + 1)).left <= left
    assert memory(KIMI, replace(plan, budget=budget + 1)).left <= left


@given(st.floats(1, 8), st.floats(5, 200))
def test_tokens_follow_acceptance_and_step_time(acceptance: float, step_ms: float) -> None:
    one, twice = (rates(KIMI, Plan(acceptance=acceptance * k, step_ms=step_ms)) for k in (1, 2))
    assert twice.tokens_per_s == pytest.approx(2 * one.tokens_per_s)
    assert one.itl_ms == pytest.approx(step_ms / acceptance)


def test_the_sizing_pages_numbers_are_the_calculators() -> None:
    """Kimi's column, each to the digits that it shows, and what the text makes of it."""
    page = (Path(__file__).parent.parent / "docs" / "sizing.md").read_text()
    found = asdict(memory(KIMI, Plan()))
    rows = dict(re.findall(r"^\| \**([\w/ ]+?)\** \| [^|]* \| \**([\d.]+)\** \|$", page, re.MULTILINE))
    names = {"KV indices": "kv_indices", "left for K/V": "left"}
    shown = {names.get(row, row): number for row, number in rows.items()}
    assert set(shown) == set(found) - {"kv_tokens"}
    assert {name: f"{found[name]:.{len(text.partition('.')[2])}f}" for name, text in shown.items()} == shown
    drafter = kv_bytes(KIMI, 8) - kv_bytes(replace(KIMI, draft_layers=0), 8)
    assert f"{kv_bytes(KIMI, 8) - drafter:,} + {drafter:,} bytes" in page
    assert f"about {found['kv_tokens'] / 1e6:.1f} million tokens" in page


def test_the_command_takes_shapes_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smollm2-135m", "--json", "--gpus", "1", "--gpu-gib", "80", "--slots", "8", "--context", "8192"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2 + 2 * 5 * 3 * 64 * 2


def test_help_says_what_each_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(HELP) == {field.name for group in (Model, Plan) for field in fields(group)}
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "memory of each GPU, GiB (default: 268)" in " ".join(capsys.readouterr().out.split())


def test_the_command_says_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kimi-k2.6", "--gpus", "1"]) == 1
    assert "not one request fits" in capsys.readouterr().err


def test_the_command_refuses_nonsense() -> None:
    with pytest.raises(SystemExit):
        main(["kimi-k2.6", "--step-ms", "0"])
