"""Properties of the whole error tree."""

import pickle
from collections.abc import Iterator

import pytest

from serve_app import errors
from serve_app.errors import ServeError


def tree(root: type[ServeError]) -> Iterator[type[ServeError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


ALL = [cls for cls in tree(ServeError) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", ALL)
def test_the_envelope_has_the_four_keys_with_strings_or_null(cls: type[ServeError]) -> None:
    body = cls("why", param="a[0].b").body()["error"]
    assert list(body) == ["message", "type", "param", "code"]
    assert all(value is None or isinstance(value, str) for value in body.values())


@pytest.mark.parametrize("cls", ALL)
def test_only_what_was_never_started_may_be_retried(cls: type[ServeError]) -> None:
    assert cls.retryable == (cls.status in (429, 503))
    assert cls("why").headers()["x-should-retry"] == str(cls.retryable).lower()


@pytest.mark.parametrize("cls", ALL)
def test_errors_survive_the_trip_between_processes(cls: type[ServeError]) -> None:
    error = cls("why", param="p", code="c", retry_after=2)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.body(), copy.headers()) == (error.body(), error.headers())


def test_retry_after_is_a_whole_number_of_at_least_one_second() -> None:
    assert ServeError("why", retry_after=0.2).headers()["retry-after"] == "1"
