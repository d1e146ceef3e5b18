"""Homes of keys among names, computed alike by everybody who knows the names: consistent hashing.

Each name owns points on a circle of 2^64; a key belongs to the name whose point comes next. When a name goes, only its
keys move, to many others.

What this module does not do: know loads or replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from hashlib import blake2b

POINTS = 128
CIRCLE = 2**64


class Ring:
    """Built anew when the names change, in about a millisecond for ten of them."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._own = {name: sorted(place(f"{name}\0{i}") for i in range(POINTS)) for name in names}
        circle = sorted((point, name) for name, points in self._own.items() for point in points)
        self._points = [point for point, _ in circle]
        self._owners = [name for _, name in circle]

    def walk(self, key: str) -> Iterator[str]:
        """Owners of the points that follow a key, once around; names come again and again."""
        start = bisect_left(self._points, place(key))
        yield from self._owners[start:]
        yield from self._owners[:start]

    def distance(self, key: str, name: str) -> int:
        """How far a key is from the next point of a name: of several names, the nearest comes first in `walk`."""
        at, own = place(key), self._own[name]
        index = bisect_left(own, at)
        return (own[index % POINTS] - at) % CIRCLE


def place(key: str) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
