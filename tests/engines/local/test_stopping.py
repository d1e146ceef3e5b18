"""Stop strings, end tokens and limits, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from serve_app.engines.base import SamplingParams
from serve_app.engines.local.detokenizer import make_detokenizer
from serve_app.engines.local.stopping import Ending, StopStrings, TextStream
from serve_app.engines.local.vocabulary import Vocabulary

END = 2


@pytest.fixture(scope="module")
def vocabulary(tiny: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(tiny))


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def run(
    vocabulary: Vocabulary, tokens: list[int], sizes: list[int], **params: Any
) -> tuple[int, list[str], Ending | None]:
    """Feed tokens in blocks of the given sizes; returns tokens used, texts, ending."""
    limit = params.pop("max_tokens", 1000)
    stream = TextStream(SamplingParams(**params), make_detokenizer(vocabulary), limit, {END})
    used, texts, at = 0, [], 0
    for size in [*sizes, len(tokens)]:
        kept, text, ending = stream.push(tokens[at : at + size])
        used, at = used + kept, at + size
        texts.append(text)
        if ending is not None or at >= len(tokens):
            return used, texts, ending
    raise AssertionError("unreachable")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    tokens=st.lists(st.one_of(st.sampled_from([0, 1, END, *ids("aé🎉")]), st.integers(0, 258)), max_size=30),
    sizes=st.lists(st.integers(1, 6), max_size=30),
    limit=st.integers(1, 40),
    sampling=st.sampled_from([{}, {"ignore_eos": True}, {"stop_token_ids": (5,)}, {"stop": ("a",)}, {"min_tokens": 3}]),
)
def test_a_block_gives_what_its_tokens_give_one_by_one(
    vocabulary: Vocabulary, tokens: list[int], sizes: list[int], limit: int, sampling: dict[str, Any]
) -> None:
    def stream() -> TextStream:
        return TextStream(SamplingParams(**sampling), make_detokenizer(vocabulary), limit, {END})

    fast, naive, at = stream(), stream(), 0
    for size in [*sizes, len(tokens)]:
        block, at = tokens[at : at + size], at + size
        found = fast.push(block)
        assert found == naive.push_each(block) and fast.count == naive.count
        if found[2] is not None:
            return
    assert fast.finish() == naive.finish()


@settings(max_examples=200)
@given(
    text=st.text("ab\n", max_size=20),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=20),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    strings, shown, at, stop = StopStrings(stops), "", 0, None
    for size in [*cuts, len(text) + 1]:
        piece, at = text[at : at + size], at + size
        # Token by token, as the stream feeds it: the first stop to complete wins.
        for char in piece:
            more, stop = strings.push(char)
            shown += more
            if stop is not None:
                break
        if stop is not None:
            break
    if stop is None:
        shown += strings.flush()
        assert shown == text
        assert not any(s in text for s in stops)
    else:
        ends = min(text.find(s) + len(s) for s in stops if s in text)
        assert (shown + stop) == text[: len(shown + stop)]
        assert len(shown + stop) == ends


def test_a_prefix_of_a_stop_is_held_until_it_is_decided() -> None:
    strings = StopStrings(["STOP"])
    assert strings.push("a ST") == ("a ", None)
    assert strings.push("O") == ("", None)
    assert strings.push("RE") == ("STORE", None)


@pytest.mark.parametrize("sizes", [[1] * 30, [3] * 10, [30]])
def test_nothing_leaks_past_a_stop_inside_a_block(vocabulary: Vocabulary, sizes: list[int]) -> None:
    used, texts, ending = run(vocabulary, ids("one\n\ntwo\n\n"), sizes, stop=("\n\n",))
    assert ("".join(texts), used, ending) == ("one", 5, Ending("stop", "\n\n"))


@pytest.mark.parametrize("sizes", [[1] * 8, [8]])
@pytest.mark.parametrize(("cap", "reason", "used"), [(5, "stop", 3), (3, "stop", 3), (2, "length", 2)])
def test_the_earlier_of_cap_and_end_token_decides(
    vocabulary: Vocabulary, sizes: list[int], cap: int, reason: str, used: int
) -> None:
    got, texts, ending = run(vocabulary, [*ids("ab"), END, *ids("cdef")], sizes, max_tokens=cap)
    assert ending is not None
    assert (got, "".join(texts), ending.reason) == (used, "ab", reason)


def test_ignored_end_tokens_go_on(vocabulary: Vocabulary) -> None:
    used, texts, ending = run(vocabulary, [*ids("a"), END, *ids("b")], [3], ignore_eos=True)
    assert (used, "".join(texts), ending) == (3, "ab", None)


def test_a_stop_token_is_reported_and_its_text_left_out(vocabulary: Vocabulary) -> None:
    stop = ids("x")[0]
    used, texts, ending = run(vocabulary, ids("abxc"), [4], stop_token_ids=(stop,))
    assert (used, "".join(texts), ending) == (3, "ab", Ending("stop", stop))


def test_stops_before_min_tokens_are_text(vocabulary: Vocabulary) -> None:
    used, texts, ending = run(vocabulary, ids("a.b.c"), [5], stop=(".",), min_tokens=3)
    assert (used, "".join(texts), ending) == (4, "a.b", Ending("stop", "."))


def test_held_text_is_shown_when_the_limit_ends_it(vocabulary: Vocabulary) -> None:
    used, texts, ending = run(vocabulary, ids("abST"), [4], stop=("STOP",), max_tokens=4)
    assert (used, "".join(texts), ending) == (4, "abST", Ending("length"))


def test_a_stop_string_of_several_bytes_per_character(vocabulary: Vocabulary) -> None:
    used, texts, ending = run(vocabulary, ids("日本語"), [2, 2, 2, 2, 2], stop=("本",))
    assert (used, "".join(texts), ending) == (6, "日", Ending("stop", "本"))
