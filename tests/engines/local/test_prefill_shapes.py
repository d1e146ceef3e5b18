"""A CPU keeps kernels per shape, so prompts of any length must be computed in few shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.engines.base import SamplingParams
from serve_app.engines.local.target import Target
from tests.engines.local.oracle import Rig, tokens


def test_prompts_of_forty_lengths_take_two_widths(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    forward = Target.forward

    def recording(self: Target, input_ids: Any, *rest: Any) -> Any:
        widths.append(input_ids.shape[1])
        return forward(self, input_ids, *rest)

    monkeypatch.setattr(Target, "forward", recording)
    rig = Rig(tiny, slots=1)  # pieces of up to 32 tokens
    for length in range(1, 41):
        (chunks,) = rig.run([(tuple(range(3, 3 + length)), SamplingParams(max_tokens=1, temperature=0))])
        assert len(tokens(chunks)) == 1
    assert set(widths) == {16, 32}


def test_a_prompt_gives_the_same_alone_and_beside_a_longer_one(tiny: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    short, long = tuple(range(3, 10)), tuple(range(3, 33))
    (alone,) = Rig(tiny, slots=1).run([(short, params)])
    together = Rig(tiny, slots=2).run([(long, params), (short, params)])
    assert tokens(together[1]) == tokens(alone)
