"""What travels comes out as it went in, and a stranger's bytes are refused."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel.wire import HEADER, ITEM, ChannelError, item_of, join, pack_end, pack_item, unpack
from serve_app.engines.base import Usage
from serve_app.errors import ContextLengthExceeded, NotReady, ServeError
from serve_app.protocol import Item, Progress

COUNTS = st.integers(0, 2**40)
PROGRESS = st.builds(
    Progress,
    st.integers(0, 1000),
    st.lists(COUNTS).map(tuple),
    st.booleans(),
    st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS),
    st.none() | st.tuples(COUNTS, st.binary(max_size=3)),
)
ITEMS = st.builds(
    Item,
    st.binary(),
    COUNTS,
    st.booleans(),
    st.none(),
    st.lists(PROGRESS, max_size=4).map(tuple),
    st.text(),
    st.booleans(),
)


@given(st.lists(ITEMS, max_size=5))
def test_items_come_out_as_they_went_in(items: list[Item]) -> None:
    packed = join([*(pack_item(7, number, item) for number, item in enumerate(items)), pack_end(7, len(items))])
    assert HEADER.unpack_from(packed) == (len(packed) - HEADER.size,)
    *entries, end = unpack(packed[HEADER.size :])
    assert [entry[:3] for entry in entries] == [[ITEM, 7, number] for number in range(len(items))]
    assert [item_of(entry) for entry in entries] == items
    assert end[1:] == [7, len(items)]


@pytest.mark.parametrize("error", [NotReady("a", code="x", retry_after=1.5), ContextLengthExceeded("b", param="c.d")])
def test_an_error_keeps_its_class(error: ServeError) -> None:
    (entry,) = unpack(join([pack_item(1, 0, Item(error=error))])[HEADER.size :])
    found = item_of(entry).error
    assert type(found) is type(error)
    assert found is not None and (found.body(), found.headers()) == (error.body(), error.headers())


@given(st.binary(max_size=200))
def test_whatever_bytes_are_an_entry_or_refused(noise: bytes) -> None:
    try:
        entries = unpack(noise)
    except ChannelError:
        return
    for entry in entries:
        with contextlib.suppress(ChannelError):
            assert isinstance(item_of(entry), Item)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_message_that_ends_too_soon_is_refused(cut: int) -> None:
    with pytest.raises(ChannelError):
        unpack(join([pack_item(1, 0, Item(b"data: x\n\n", 3))])[HEADER.size : -cut])


def test_token_ids_of_an_array_are_numbers() -> None:
    item = Item(b"x", 2, True, None, (Progress(0, tuple(np.array([5, 2**40]))),))
    (entry,) = unpack(join([pack_item(1, 0, item)])[HEADER.size :])
    assert item_of(entry).progress == (Progress(0, (5, 2**40)),)
