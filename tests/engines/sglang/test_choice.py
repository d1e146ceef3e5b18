"""SGLang's outputs → chunks, on outputs as its tokenizer manager makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.engines.base import Chunk, SamplingParams
from serve_app.engines.local.detokenizer import make_detokenizer
from serve_app.engines.local.stopping import TextStream
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.engines.sglang.choice import Choice, refused_field
from serve_app.engines.sglang.submission import Courier, Submission
from serve_app.errors import EngineFailed, InvalidRequest, Overloaded, ServeError
from tests.engines.local.conftest import write_tokenizer

END = 2


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Vocabulary(AutoTokenizer.from_pretrained(path))


def choice(vocabulary: Vocabulary, max_tokens: int = 100, **sampling: Any) -> Choice:
    params = SamplingParams(**sampling)
    text = TextStream(params, make_detokenizer(vocabulary), max_tokens, {END})
    return Choice(0, "rid", 5, text, vocabulary, params.logprobs, refused_field(params))


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def output(tokens: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {"output_ids": tokens, "meta_info": {"finish_reason": finish, "cached_tokens": 4, **meta}}


def fed(made: Choice, tokens: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> Chunk:
    chunk = made.feed(output(tokens, finish, **meta))
    assert chunk is not None
    return chunk


def test_a_block_of_tokens_is_one_chunk(vocabulary: Vocabulary) -> None:
    chunk = fed(choice(vocabulary), ids("abc"))
    assert (chunk.token_ids, chunk.text, chunk.finish_reason, chunk.usage) == (tuple(ids("abc")), "abc", None, None)


def test_an_output_without_tokens_is_none(vocabulary: Vocabulary) -> None:
    assert choice(vocabulary).feed(output([])) is None


def test_a_stop_inside_a_block_ends_it_there(vocabulary: Vocabulary) -> None:
    made = choice(vocabulary, stop=("bc",))
    chunk = fed(made, ids("abcd"))
    assert (chunk.token_ids, chunk.text) == (tuple(ids("abc")), "a")
    assert (chunk.finish_reason, chunk.stop_reason, made.over) == ("stop", "bc", True)
    assert chunk.usage is not None and (chunk.usage.completion_tokens, chunk.usage.cached_tokens) == (3, 4)


def test_an_end_token_wins_over_the_limit(vocabulary: Vocabulary) -> None:
    chunk = fed(choice(vocabulary, max_tokens=2), [*ids("a"), END], {"type": "length", "length": 2})
    assert (chunk.finish_reason, chunk.stop_reason, chunk.text) == ("stop", None, "a")


def test_sglangs_own_end_is_the_end(vocabulary: Vocabulary) -> None:
    half = "é".encode()[:1]
    chunk = fed(choice(vocabulary), [3 + half[0]], {"type": "length", "length": 1})
    assert (chunk.finish_reason, chunk.text) == ("length", "\ufffd")


def test_logprobs_are_one_per_kept_token(vocabulary: Vocabulary) -> None:
    tokens = ids("abcd")
    rows = [(-0.5, token, None) for token in tokens]
    tops = [[(-0.5, token, None), (-1.5, 7, None)] for token in tokens]
    made = choice(vocabulary, stop=("bc",), logprobs=2)
    chunk = fed(made, tokens, output_token_logprobs=rows, output_top_logprobs=tops)
    assert chunk.logprobs is not None and [entry.token for entry in chunk.logprobs] == ["a", "b", "c"]
    assert [[other.token_id for other in entry.top] for entry in chunk.logprobs] == [[t, 7] for t in tokens[:3]]


def test_logprobs_of_other_tokens_are_a_fault(vocabulary: Vocabulary) -> None:
    with pytest.raises(EngineFailed):
        choice(vocabulary, logprobs=0).feed(output(ids("a"), output_token_logprobs=[(-1.0, 9, None)]))


def test_an_abort_repeats_no_token(vocabulary: Vocabulary) -> None:
    made = choice(vocabulary)
    fed(made, ids("ab"))
    chunk = fed(made, ids("b"), {"type": "abort", "message": "Abort"})
    assert (chunk.token_ids, chunk.finish_reason) == ((), "abort")
    assert chunk.usage is not None and chunk.usage.completion_tokens == 2


@pytest.mark.parametrize(("status", "error"), [(400, InvalidRequest), (503, Overloaded), (500, EngineFailed)])
def test_a_refusal_is_an_error(vocabulary: Vocabulary, status: int, error: type[ServeError]) -> None:
    made = choice(vocabulary)
    with pytest.raises(error):
        made.feed(output([], {"type": "abort", "message": "no", "status_code": status}))
    assert made.over


def test_a_refused_grammar_is_the_response_formats(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refused = {"type": "abort", "message": "no", "status_code": 400}
        choice(vocabulary, json_schema="{}").feed(output([], refused))
    assert caught.value.param == "response_format"


def test_a_grammar_that_fails_is_no_lost_replica(vocabulary: Vocabulary) -> None:
    made = choice(vocabulary, json_schema="{}")
    fed(made, ids("ab"))
    with pytest.raises(InvalidRequest) as caught:
        made.feed(output(ids("b"), {"type": "abort", "message": "Aborted"}))
    assert (caught.value.param, made.over) == ("response_format", True)


class _Loop(asyncio.AbstractEventLoop):
    """Only what a reader of chunks that have arrived asks for."""


async def test_a_readers_loop_is_woken_once_for_all_that_a_step_made(vocabulary: Vocabulary) -> None:
    loop, woken = _Loop(), []
    loop.call_soon_threadsafe = lambda function, *given: woken.append((function, given))  # type: ignore[method-assign]
    first, second = (Submission(loop, 1) for _ in range(2))
    courier, chunks = Courier(), [Chunk(0, (n,), str(n)) for n in range(3)]
    for submission, chunk in zip((first, second, first), chunks, strict=True):
        courier.put(submission, chunk)
    courier.go()
    courier.go()  # nothing is left
    ((function, given),) = woken
    function(*given)
    read = first.chunks()
    assert [await anext(read), await anext(read)] == [chunks[0], chunks[2]]
    assert await anext(second.chunks()) == chunks[1]
