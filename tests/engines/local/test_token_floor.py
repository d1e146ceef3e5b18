"""The floor never exceeds the true count, and what it refuses is refused without tokenising."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.engines.local.prompts import PromptRenderer
from serve_app.engines.local.token_floor import TokenFloor
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.errors import ContextLengthExceeded
from serve_app.models import resolve
from tests.engines.local.conftest import VOCAB, write_tokenizer
from tests.engines.local.real import MODEL

# The vocabulary's longest tokens among them, characters that compose, and what a special token spells.
PIECES = ["#" * 80, "=" * 64, " " * 40, "internationalization", "e\u0301", "\u212a", "<|im_end|>", "🌍"]
PIECES += ["\u03b1\u0313\u0300\u0345", "\x16" * 9, "\U00040000" * 3]  # the last two have bytes without a token
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=20).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve(MODEL).path)


def fresh(path: Any) -> Any:
    write_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module", params=["as it is", "composing"])
def counted(request: pytest.FixtureRequest) -> tuple[Any, TokenFloor]:
    tokenizer = AutoTokenizer.from_pretrained(resolve(MODEL).path)
    if request.param == "composing":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer, TokenFloor(tokenizer, Vocabulary(tokenizer))


@pytest.mark.model
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=texts)
@example(text="\x16")
@example(text="\U00040000")
def test_it_is_never_above_the_true_count(counted: tuple[Any, TokenFloor], text: str) -> None:
    tokenizer, floor = counted
    assert floor(text) <= len(tokenizer(text)["input_ids"])


@pytest.mark.model
def test_a_long_text_has_a_floor_of_use(tokenizer: Any) -> None:
    assert TokenFloor(tokenizer, Vocabulary(tokenizer))("word " * 100_000) > 8192


@pytest.mark.parametrize("how", ["strip", "lower", "removed", "rstrip"])
def test_there_is_no_floor_where_text_may_be_dropped(tmp_path: Any, how: str) -> None:
    tokenizer = fresh(tmp_path)
    assert TokenFloor(tokenizer, Vocabulary(tokenizer))("x" * 99) > 0
    backend = tokenizer.backend_tokenizer
    if how == "strip":
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    elif how == "lower":
        backend.normalizer = normalizers.Lowercase()
    elif how == "removed":
        split = pre_tokenizers.Split("x", "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    else:
        backend.add_special_tokens([AddedToken("<s>", rstrip=True)])
    assert TokenFloor(tokenizer, Vocabulary(tokenizer))("x" * 99) == 0


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(tmp_path: Any, kind: str) -> None:
    tokenizer = fresh(tmp_path)
    renderer = PromptRenderer(tokenizer, VOCAB, TokenFloor(tokenizer, Vocabulary(tokenizer)))

    def wanted(size: int) -> GenerateRequest:
        text = "x" * size
        if kind == "prompt":
            return GenerateRequest("r", SamplingParams(), prompt=text)
        return GenerateRequest("r", SamplingParams(), messages=[{"role": "user", "content": text}])

    assert len(renderer.encode(wanted(50), 100)) >= 50
    with pytest.raises(ContextLengthExceeded) as refused:
        renderer.encode(wanted(1200), 100)
    assert (refused.value.param, "at least" in refused.value.message) == (kind, True)
    # /tokenize has no context to fit.
    assert len(renderer.encode(wanted(1200))) >= 1200
