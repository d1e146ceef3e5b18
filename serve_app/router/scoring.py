"""Which replica a request should go to: a pure function of what is known about each.

Affinity under a load bound. Where a replica holds the longest prefix of the prompt, the request goes there, unless the
replica has clearly more to do than its peers; then the next best holder is taken, and in the end anybody within the
bound. A prompt that nobody holds goes to its *home*, which every router computes alike, so that several routers send
the turns of one chat to the same replica without talking to each other: of the replicas on which its system prompt
shall live (see `beginnings`), where there are any within the bound.

`choose` looks at every replica, and is what the tests hold `fleet` against, which does not.

What this module does not do: keep anything (see `prefixes`), or know Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from serve_app.router.ring import Ring


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as a router sees it.

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


def choose(candidates: Sequence[Candidate], home_key: str, policy: Policy, homes: Collection[str] = ()) -> str:
    """Name of the best of at least one. Unhealthy replicas only where nobody is healthy: then a try beats none.

    Args:
        home_key: what the turns of one chat have in common. homes: names on which its beginning lives; empty for all.
    """
    ring = Ring([candidate.name for candidate in candidates])
    able = [c for c in candidates if c.healthy] or list(candidates)
    bound = load_bound(sum(c.ongoing for c in able), len(able), policy)
    free = [c for c in able if c.ongoing <= bound]
    most = max(c.overlap for c in free)
    # Of those that hold as much, the home; of those that hold nothing, too.
    if most >= policy.least_overlap:
        alike = [c for c in free if c.overlap == most]
    else:
        alike = [c for c in free if c.name in homes] or free
    return min(alike, key=lambda c: ring.distance(home_key, c.name)).name


def load_bound(total: int, replicas: int, policy: Policy) -> float:
    """Requests that a replica may have and still attract more, when `replicas` together have `total`."""
    mean = total / replicas if replicas else 0.0
    return mean + max(policy.slack * mean, policy.least_slack - 1)
