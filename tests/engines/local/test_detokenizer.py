"""Incremental text adds up to the one-shot decoding and never splits a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from serve_app.engines.local.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    detokenize_reference,
    make_detokenizer,
)
from serve_app.engines.local.vocabulary import Vocabulary

TEXTS = ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉", "a\n\n b\t", "мир 🌍!"]
BYTES = 3  # the tiny tokenizer's first byte token


@pytest.fixture(scope="module")
def byte_level(tiny: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(tiny))


@pytest.fixture(scope="module")
def sentencepiece() -> Vocabulary:
    """Word pieces with leading-space marks beside byte tokens, decoded as Llama 2's tokenizer does."""
    pieces = ["<s>", "▁hello", "▁", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))


def stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_the_decoder_fits_the_vocabulary(byte_level: Vocabulary, sentencepiece: Vocabulary) -> None:
    assert isinstance(make_detokenizer(byte_level), ByteDetokenizer)
    assert isinstance(make_detokenizer(sentencepiece), WindowDetokenizer)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
def test_whole_characters_only(
    byte_level: Vocabulary, text: str, kind: type[ByteDetokenizer] | type[WindowDetokenizer]
) -> None:
    deltas = stream(kind(byte_level), [BYTES + byte for byte in text.encode()])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(tokens=st.lists(st.integers(0, BYTES + 255), max_size=60))
@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
def test_any_bytes_add_up_to_the_one_shot_text(
    byte_level: Vocabulary, kind: type[ByteDetokenizer] | type[WindowDetokenizer], tokens: list[int]
) -> None:
    assert "".join(stream(kind(byte_level), tokens)) == detokenize_reference(byte_level, tokens)


class Watched(Vocabulary):
    longest = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.longest = max(self.longest, len(tokens))
        return super().decode(tokens)


@pytest.mark.parametrize("tokens", [[BYTES + 0x80], [BYTES + 0xE6, BYTES + 0x97], [1, 2], [300], [BYTES + 65]])
def test_a_window_is_bounded_whatever_the_text(tiny: Path, tokens: list[int]) -> None:
    vocabulary, endless = Watched(AutoTokenizer.from_pretrained(tiny)), tokens * 200
    deltas = stream(WindowDetokenizer(vocabulary), endless)
    assert vocabulary.longest < 50
    assert "".join(deltas) == detokenize_reference(vocabulary, endless)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_tokens(sentencepiece: Vocabulary, text: str) -> None:
    tokens = [1, 3, *(5 + byte for byte in text.encode()), 1, 2, 4]
    deltas = stream(make_detokenizer(sentencepiece), tokens)
    assert "".join(deltas) == detokenize_reference(sentencepiece, tokens) == f"helloa{text} hello b"
    assert not any("\ufffd" in delta for delta in deltas)


def test_special_tokens_are_left_out(byte_level: Vocabulary) -> None:
    assert "".join(stream(make_detokenizer(byte_level), [1, BYTES + 65, 2, 0])) == "A"


def test_an_incomplete_character_at_the_end_becomes_one_replacement(byte_level: Vocabulary) -> None:
    deltas = stream(make_detokenizer(byte_level), [BYTES + byte for byte in "é🎉".encode()[:-1]])
    assert deltas == ["", "é", "", "", "", "\ufffd"]


def test_bytes_of_tokens(byte_level: Vocabulary, sentencepiece: Vocabulary) -> None:
    assert [byte_level.bytes_of(BYTES + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert byte_level.bytes_of(1) == b"<|im_start|>"
    assert byte_level.bytes_of(100_000) == b""
    assert sentencepiece.bytes_of(1) == b" hello"
    assert sentencepiece.bytes_of(5 + 0xE2) == b"\xe2"
