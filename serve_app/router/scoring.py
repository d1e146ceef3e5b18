"""Which replica a request should go to: a pure function of what is known about each.

Affinity under a load bound. Where a replica holds the longest prefix of the prompt, the request goes there, unless the
replica has clearly more to do than its peers; then the next best holder is taken, and in the end the least loaded.
A prompt that nobody holds goes to its *home*, which every router computes alike, so that several routers send the
turns of one chat to the same replica without talking to each other.

What this module does not do: keep anything (see `prefixes`), or know Ray.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple


class Candidate(NamedTuple):
    """A replica as a router sees it (a tuple: one is made per replica and decision).

    Attributes:
        name: its id. ongoing: requests it works on. overlap: share of the prompt that it holds, 0 to 1.
        healthy: it answers, generates, and is not about to leave.
    """

    name: str
    ongoing: int
    overlap: float = 0.0
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """`slack`: how many requests more than the mean a replica may have before affinity gives way, as a share of the
    mean; at least `least_slack` requests. `least_overlap`: less than this share of a prompt attracts nothing."""

    slack: float = 0.5
    least_slack: int = 4
    least_overlap: float = 0.1


def rank(candidates: Sequence[Candidate], home_key: str, policy: Policy) -> list[str]:
    """Names, the best first, then by load. Unhealthy replicas only where nobody is healthy: then a try beats none.

    Args:
        home_key: what the turns of one chat have in common.
    """
    able = [c for c in candidates if c.healthy] or list(candidates)
    if len(able) < 2:
        return [candidate.name for candidate in able]
    bound = load_bound([c.ongoing for c in able], policy)
    free = [c for c in able if c.ongoing <= bound]
    most = max(c.overlap for c in free)
    # Of those that hold as much, the home; of those that hold nothing, too.
    alike = [c for c in free if c.overlap == most] if most >= policy.least_overlap else free
    best = alike[0] if len(alike) == 1 else max(alike, key=lambda c: home_weight(home_key, c.name))
    rest = [candidate for candidate in able if candidate is not best]
    rest.sort(key=attrgetter("ongoing"))
    return [best.name, *(candidate.name for candidate in rest)]


def load_bound(loads: Sequence[int], policy: Policy) -> float:
    """Requests that a replica may have and still attract more."""
    mean = sum(loads) / len(loads)
    return mean + max(policy.slack * mean, policy.least_slack - 1)


def home_weight(key: str, name: str) -> int:
    """Rendezvous hashing: a key's home is the name with the largest weight; when a name goes, only its keys move."""
    return zlib.crc32(name.encode(), zlib.crc32(key.encode())) * 2654435761 % 2**32
