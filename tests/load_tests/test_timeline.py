"""What counts as an answer, line by line."""

import json

import pytest

from load_tests.timeline import Outcome, StreamReader, read_whole, refused

USAGE = {"prompt_tokens": 3, "completion_tokens": 9}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


def said(text: str, key: str = "content") -> bytes:
    return event(choices=[{"index": 0, "delta": {key: text}, "finish_reason": None}])


END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
COUNTED = event(choices=[], usage=USAGE)
DONE = b"data: [DONE]\n"


def read(*lines: bytes) -> Outcome:
    """A line each tenth of a second, the first at 0.1."""
    outcome = Outcome("chat", 0.0)
    reader = StreamReader(outcome)
    at = 0.0
    for number, line in enumerate(lines, 1):
        at = number / 10
        if reader.line(line, at):
            break
    reader.finish(at)
    return outcome


def test_a_whole_stream_is_measured() -> None:
    outcome = read(b": ping\n", said("a"), b"\n", said("b"), said("c"), END, COUNTED, DONE)
    assert outcome.ok
    assert outcome.ttft_s == pytest.approx(0.2)
    assert outcome.gaps == pytest.approx([0.2, 0.1])
    assert outcome.tpot_s == pytest.approx((0.6 - 0.2) / 8)
    assert outcome.tokens_per_frame == pytest.approx(8 / 3)
    assert outcome.end_s == pytest.approx(0.8)
    assert outcome.text == "abc"


def test_the_first_content_counts_and_not_the_role() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    assert read(role, said("a"), COUNTED, DONE).ttft_s == pytest.approx(0.2)


def test_reasoning_is_content() -> None:
    assert read(said("hm", "reasoning_content"), said("a"), COUNTED, DONE).ttft_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        ([said("a")], "cut"),
        ([], "cut"),
        ([said("a"), END, COUNTED], "no_done"),
        ([said("a"), END, DONE], "no_usage"),
        ([END, COUNTED, DONE], "empty"),
        ([said(""), COUNTED, DONE], "empty"),
        ([said("a"), event(error={"message": "x", "code": "engine_error"}), DONE], "error_frame:engine_error"),
        ([said("a"), event(error="x"), DONE], "error_frame:unnamed"),
        ([said("a"), b"data: {no\n", COUNTED, DONE], "bad_event"),
        ([said("a"), b"data: 3\n", COUNTED, DONE], "bad_event"),
    ],
)
def test_what_is_not_a_whole_answer_fails(lines: list[bytes], failure: str) -> None:
    assert read(*lines).failure == failure


def test_an_abandoned_stream_neither_fails_nor_counts() -> None:
    outcome = Outcome("abandon", 0.0)
    reader = StreamReader(outcome)
    reader.line(said("a"), 0.1)
    outcome.abandoned = True
    reader.finish(0.2)
    assert outcome.failure is None and not outcome.ok


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ({"choices": [{"message": {"content": "a"}}], "usage": USAGE}, None),
        ({"choices": [{"text": "a"}], "usage": USAGE}, None),
        ({"choices": [{"message": {"content": None}}], "usage": USAGE}, "empty"),
        ({"choices": [{"message": {"content": "a"}}]}, "no_usage"),
        ({"choices": []}, "bad_body"),
        ([], "bad_body"),
    ],
)
def test_answers_that_do_not_stream(body: object, failure: str | None) -> None:
    outcome = Outcome("whole", 0.0, stream=False)
    read_whole(outcome, json.dumps(body).encode(), 0.5)
    assert outcome.failure == failure


def test_a_refusal_is_named_by_status_and_code() -> None:
    outcome = Outcome("chat", 0.0, status=503)
    refused(outcome, b'{"error": {"code": "overloaded"}}', 0.1)
    assert (outcome.failure, outcome.retry_after_s) == ("status_503:overloaded", 0.0)
    refused(outcome, b"Internal Server Error", 0.1, "7")
    assert outcome.retry_after_s == 7.0
    refused(outcome, b"Internal Server Error", 0.1, "Tue, 01 Dec 2026 00:00:00 GMT")
    assert outcome.retry_after_s == 0.0
    assert outcome.failure == "status_503:not_openai"
