"""The replicas as one router sees them, kept so that a decision costs the same among 1 and among 64.

`scoring.choose` says what is decided, and looks at every replica for it. This arrives at the same replica from sums
that are kept up to date: the holders of a prompt are asked for the deepest block first, a home by a walk on the ring.

What this module does not do: know Ray, or the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from serve_app.router.beginnings import WINDOW, Beginnings
from serve_app.router.prefixes import PrefixTable
from serve_app.router.ring import Ring
from serve_app.router.scoring import Policy, load_bound

# What a replica said longer ago says nothing about its load now: others send to it as well.
LOAD_EXPIRES_S = 10.0


class Fleet:
    """`now`: seconds of any clock that does not go back."""

    def __init__(self, policy: Policy, table: PrefixTable) -> None:
        self._policy, self._table = policy, table
        self._beginnings = Beginnings()
        self._ring = Ring()
        # (beginning, how many) → the first owners that follow it on the ring.
        self._homes: OrderedDict[tuple[str, int], frozenset[str]] = OrderedDict()
        self._names: frozenset[str] = frozenset()
        self._cache_blocks = 0.0
        # Name → (requests, since when that is known), the oldest knowledge first; without an entry it is idle.
        self._loads: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._total = 0

    def become(self, names: Collection[str], cache_blocks: float = 0) -> None:
        """These are the replicas from now on. `cache_blocks`: of a prompt, what the prefix cache of each holds; 0 where
        that is not known."""
        self._cache_blocks = cache_blocks
        for name in self._names.difference(names):
            self._table.forget(name)
            self.set_load(name, 0, 0)
        if self._names != frozenset(names):
            self._names, self._ring = frozenset(names), Ring(names)
            self._homes.clear()

    def load(self, name: str) -> int:
        return self._loads[name][0] if name in self._loads else 0

    def set_load(self, name: str, requests: int, now: float) -> None:
        """It works on so many. A replica that has left no longer counts."""
        if name not in self._names:
            return
        self._total += requests - self.load(name)
        self._loads.pop(name, None)
        if requests:
            self._loads[name] = (requests, now)

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._loads:
            name, (_, since) = next(iter(self._loads.items()))
            if now - since <= LOAD_EXPIRES_S:
                return
            self.set_load(name, 0, now)

    def choose(
        self,
        blocks: Sequence[int],
        common: int,
        home_key: str,
        unwell: Collection[str] = (),
        beginning: str = "",
    ) -> str:
        """The name that a request should go to.

        Args:
            blocks, common, beginning: of its prompt (see `prefixes`). unwell: replicas that get nothing while others
                are well.

        Raises:
            ValueError: there are no replicas.
        """
        unwell = self._names.intersection(unwell) if unwell else ()
        if len(unwell) == len(self._names):
            unwell = ()
        able = len(self._names) - len(unwell)
        bound = load_bound(self._total - sum(map(self.load, unwell)), able, self._policy)
        best = self._holder(blocks, common, home_key, unwell, bound)
        if best is None:
            # Somebody is within the bound, since it is not below the mean.
            free = {n for n in self.homes(beginning) if n not in unwell and self.load(n) <= bound}
            owners = (n for n in self._ring.walk(home_key) if n not in unwell and self.load(n) <= bound)
            best = next((n for n in owners if not free or n in free), None)
        if best is None:
            raise ValueError("no replicas to choose from")
        return best

    def homes(self, beginning: str) -> frozenset[str]:
        """The replicas on which a beginning shall live, the same for every router that has seen as much of it; empty
        for all."""
        replicas = len(self._names)
        spread = self._beginnings.spread(beginning, replicas, self._cache_blocks) if beginning else replicas
        if spread >= replicas:
            return frozenset()
        homes = self._homes.get((beginning, spread))
        if homes is None:
            found: dict[str, None] = {}
            for name in self._ring.walk(beginning):
                found[name] = None
                if len(found) == spread:
                    break
            homes = self._homes[beginning, spread] = frozenset(found)
            while len(self._homes) > WINDOW:
                self._homes.popitem(last=False)
        return homes

    def _holder(
        self, blocks: Sequence[int], common: int, home_key: str, unwell: Collection[str], bound: float
    ) -> str | None:
        """Of those within the bound who hold most of the prompt, and enough of it, the nearest to its home."""
        own = len(blocks) - common
        for depth in range(len(blocks), common, -1):
            if (depth - common) / own < self._policy.least_overlap:
                return None
            holders = [
                name
                for name in self._table.holders(blocks[depth - 1])
                if name in self._names and name not in unwell and self.load(name) <= bound
            ]
            if len(holders) > 1:
                return min(holders, key=lambda name: self._ring.distance(home_key, name))
            if holders:
                return holders[0]
        return None

    def sent(self, blocks: Sequence[int], common: int, name: str, beginning: str = "") -> None:
        """Remember that a prompt went to a replica. What many chats have in common is not kept: it attracts nothing."""
        if beginning:
            self._beginnings.seen(beginning, common)
        if name in self._names:
            self._table.sent(islice(blocks, common, None), name)
