"""Strict JSON."""

import pytest

from serve_app.errors import InvalidRequest
from serve_app.protocol import parse_object
from serve_app.protocol.body import MAX_PARTS

BROKEN = {
    "empty": b"",
    "cut": b'{"model":"m"',
    "not utf-8": b"\xff",
    "not utf-8 inside": b'{"a":"\xff"}',
    "lone surrogate": rb'{"a":"\ud800"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "nan": b'{"a":NaN}',
    "infinite": b'{"a":1e999}',
    "endless integer": b'{"a":' + b"9" * 5000 + b"}",
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "deep lists": b"[" * 2000 + b"]" * 2000,
    "deep lists below the decoder's limit": b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
    "deep objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "duplicate key": b'{"a":1,"a":2}',
    "duplicate key inside": b'{"a":[{"b":1,"b":1}]}',
    "trailing data": b"{}{}",
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_a_body_that_is_not_a_strict_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(raw)
    assert caught.value.status == 400


def test_nulls_are_as_good_as_absent_at_every_level() -> None:
    assert parse_object(b'{"a":null,"b":{"c":null,"d":[{"e":null,"f":1}]}}') == {"b": {"d": [{"f": 1}]}}


def test_errors_do_not_quote_the_body() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(b'{"password": hunter2}')
    assert "hunter2" not in caught.value.message


def test_unusual_but_valid_text_survives() -> None:
    assert parse_object('{"a":"\\u0000\\ud83c\\udf0d é"}'.encode()) == {"a": "\x00🌍 é"}


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"a":[]}'])
def test_a_body_of_too_many_parts_is_refused(part: bytes) -> None:
    """Each costs little; a million of them stopped the process for seconds."""
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PARTS}"):
        parse_object(b'{"a":[' + b",".join([part] * MAX_PARTS) + b"]}")


def test_text_and_numbers_are_no_parts() -> None:
    body = b'{"prompt":[' + b",".join([b"1"] * 2 * MAX_PARTS) + b'],"text":"' + b"[{" * MAX_PARTS + b'"}'
    assert len(parse_object(body)["prompt"]) == 2 * MAX_PARTS
