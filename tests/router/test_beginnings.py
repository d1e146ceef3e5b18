"""On how many replicas a beginning lives."""

import random
from itertools import pairwise

from serve_app.router.beginnings import ENOUGH, MOST_OF_CACHE, ROOM, WINDOW, Beginnings

# A cache that no beginning fits into.
SMALL = 1


def seen(*beginnings: str) -> Beginnings:
    made = Beginnings()
    for beginning in beginnings:
        made.seen(beginning, 1)
    return made


def test_the_more_it_brings_the_wider_it_spreads() -> None:
    made = seen(*(["much"] * 900 + ["some"] * 90 + ["little"] * 2))
    assert [made.spread(name, 32, SMALL) for name in ("much", "some", "little")] == [32, 8, 1]


def test_what_was_never_seen_begins_with_one() -> None:
    assert seen(*"abcdefgh" * 40).spread("new", 16, SMALL) == 1


def test_among_few_replicas_nothing_is_kept_apart() -> None:
    made = seen(*(f"{i % 64}" for i in range(1000)))
    assert all(made.spread("1", replicas, SMALL) == replicas for replicas in range(1, ROOM))


def test_before_enough_was_seen_it_is_everywhere() -> None:
    made = seen(*map(str, range(ENOUGH - 1)))
    assert made.spread("1", 8, SMALL) == 8
    made.seen("another", 1)
    assert made.spread("1", 8, SMALL) == 1


def test_it_does_not_follow_chance() -> None:
    """A chat's home may change with it."""
    rng, made = random.Random(1), Beginnings()
    for _ in range(WINDOW // 2):
        made.seen(str(rng.randrange(32)), 1)
    widths = []
    for _ in range(4 * WINDOW):
        made.seen(str(rng.randrange(32)), 1)
        widths.append(made.spread("7", 32, SMALL))
    assert sum(a != b for a, b in pairwise(widths)) <= 2


def test_it_remembers_so_many_and_no_more() -> None:
    made = Beginnings()
    for i in range(5 * WINDOW):
        made.seen(f"chat {i}", 1)
        made.spread(f"chat {i}", 8, SMALL)
    assert len(made) <= 1.5 * WINDOW and made.spread("chat 1", 8, SMALL) == 1


def test_where_they_all_fit_into_a_cache_each_is_everywhere() -> None:
    made = Beginnings()
    for i in range(1000):
        made.seen(f"{i % 50}", 10)
    room = 50 * 10 / MOST_OF_CACHE
    assert (made.spread("1", 16, room), made.spread("1", 16, room - 1)) == (16, 1)
    # Nor where nobody says what fits.
    assert made.spread("1", 16, 0) == 16


def test_the_length_of_those_that_were_forgotten_counts_no_more() -> None:
    made = Beginnings()
    for i in range(WINDOW // 2):
        made.seen(f"{i}", 100)
    for i in range(5 * WINDOW):
        made.seen(f"{i % 4}", 1)
    assert len(made) == 4 and made.spread("1", 64, 10) == 64
