"""Homes against plain search, and how they move."""

import random

from serve_app.router.ring import Ring

NAMES = [f"replica{i}" for i in range(8)]
KEYS = [f"chat {i}" for i in range(1000)]


def homes(names: list[str]) -> list[str]:
    ring = Ring(names)
    return [next(ring.walk(key)) for key in KEYS]


def test_a_walk_meets_names_by_their_distance() -> None:
    ring = Ring(NAMES)
    for key in KEYS[:100]:
        met = list(dict.fromkeys(ring.walk(key)))
        assert met == sorted(NAMES, key=lambda name: ring.distance(key, name))


def test_homes_do_not_depend_on_the_order_of_names() -> None:
    assert homes(NAMES) == homes(random.Random(1).sample(NAMES, 8))


def test_chats_spread_over_homes() -> None:
    found = homes(NAMES)
    assert all(70 < found.count(name) < 190 for name in NAMES)


def test_when_a_replica_goes_only_its_chats_move() -> None:
    before, after = homes(NAMES), homes(NAMES[1:])
    assert all(b in (a, NAMES[0]) for b, a in zip(before, after, strict=True))


def test_nobody_is_nobodys_home() -> None:
    assert list(Ring().walk("chat")) == []


def test_any_text_has_a_home() -> None:
    assert next(Ring(NAMES).walk("\ud800 lone surrogate")) in NAMES
