"""Where an answer ends must not depend on how its tokens were grouped into steps."""

from __future__ import annotations

import random
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EOS, STOP_TOKEN, LIMIT = 9, 8, 12
LETTERS = "abcdefgh<#"


@pytest.fixture(autouse=True)
def _ddtree_runs(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(speculative_algorithm="DDTREE")
    monkeypatch.setattr("serve_app.sglang_plugin.hooks._running", lambda: arguments)


def request(**changes: Any) -> Any:
    """A request that has only what the end of an answer depends on; token i is the letter LETTERS[i]."""
    from sglang.srt.managers.schedule_batch import Req

    req = Req.__new__(Req)
    params = {
        "max_new_tokens": LIMIT, "stop_strs": ["dc", "abc"], "stop_str_max_len": 3, "stop_regex_strs": [],
        "stop_regex_max_len": 0, "ignore_eos": False, "stop_token_ids": {STOP_TOKEN},
    }  # fmt: skip
    req.__dict__ |= {
        "output_ids": array("q"), "finished_reason": None, "finished_len": None, "to_finish": None, "grammar": None,
        "sampling_params": SimpleNamespace(**params | changes), "eos_token_ids": {EOS}, "vocab_size": len(LETTERS),
        "decoded_text": "", "rid": "r",
        "tokenizer": SimpleNamespace(
            decode=lambda ids: "".join(LETTERS[i] for i in ids), eos_token_id=EOS, additional_stop_token_ids=None
        ),
    }  # fmt: skip
    return req


def feed(req: Any, tokens: list[int], sizes: list[int]) -> tuple[list[int], str | None]:
    """What is answered of `tokens` given in groups of `sizes`, and why it ended."""
    at = 0
    for size in sizes:
        req.output_ids.extend(tokens[at : at + size])
        req.update_finish_state(size)
        at += size
        if req.finished():
            return list(req.output_ids_through_stop), str(req.finished_reason.to_json())
    return list(req.output_ids), None


def groups(total: int, rng: random.Random) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(rng.randint(1, 6), total - sum(sizes)))
    return sizes


@pytest.mark.parametrize("changes", [{}, {"ignore_eos": True}, {"stop_strs": []}, {"max_new_tokens": 5}])
def test_groups_end_where_single_tokens_end(changes: dict[str, Any]) -> None:
    rng = random.Random(1)
    reasons = set()
    for _ in range(400):
        tokens = [rng.choice((0, 1, 2, 3, 4, 5, 6, 7, STOP_TOKEN, EOS)) for _ in range(16)]
        expected = feed(request(**changes), tokens, [1] * 16)
        assert feed(request(**changes), tokens, groups(16, rng)) == expected
        reasons.add(str(expected[1]).partition(",")[0])
    assert len(reasons) >= 2


def test_an_end_token_before_the_limit_in_the_block_that_crosses_it() -> None:
    req = request(max_new_tokens=4, stop_strs=[])
    assert feed(req, [0, 1, EOS, 2, 3, 4], [1, 5])[0] == [0, 1, EOS]
    assert req.finished_reason.to_json()["type"] == "stop"
    assert list(req.output_ids) == [0, 1, EOS, 2, 3, 4]


def test_a_grammar_that_ended_speaks_of_the_last_token() -> None:
    req = request(stop_strs=[])
    req.grammar = SimpleNamespace(is_terminated=lambda: True)
    assert feed(req, [0, 1, 2], [3])[0] == [0, 1, 2]
    assert req.grammar is not None and req.finished_reason.to_json()["matched"] == 2
