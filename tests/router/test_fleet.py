"""The fleet's decisions against the plain function of all that is known."""

import random

import pytest

from serve_app.router.beginnings import ENOUGH
from serve_app.router.fleet import LOAD_EXPIRES_S, Fleet
from serve_app.router.prefixes import PrefixTable
from serve_app.router.scoring import Candidate, Policy, choose

POLICY = Policy()
# A prefix cache that few system prompts fit into.
SMALL = 10


class Plain:
    """Keeps everything, and decides by looking at all of it."""

    def __init__(self) -> None:
        self.table = PrefixTable(10_000)
        self.loads: dict[str, int] = {}

    def choose(self, blocks: list[int], common: int, key: str, unwell: set[str], homes: frozenset[str]) -> str:
        overlaps = self.table.overlaps(blocks, self.loads, common)
        candidates = [Candidate(n, load, overlaps.get(n, 0.0), n not in unwell) for n, load in self.loads.items()]
        return choose(candidates, key, POLICY, homes)


def make(*names: str) -> tuple[Fleet, PrefixTable]:
    table = PrefixTable(100)
    fleet = Fleet(POLICY, table)
    fleet.become(names, SMALL)
    return fleet, table


@pytest.mark.parametrize("replicas", [1, 2, 5, 20, 64])
def test_it_decides_as_the_plain_function_does(replicas: int) -> None:
    rng, plain, fleet = random.Random(replicas), Plain(), Fleet(POLICY, PrefixTable(10_000))
    names = [f"replica{i}" for i in range(replicas)]
    plain.loads = dict.fromkeys(names, 0)
    fleet.become(names, SMALL)
    # So many beginnings that each lives on few replicas.
    chats: list[list[int]] = [[rng.randrange(40)] for _ in range(60)]
    for i in range(ENOUGH):
        fleet.sent((), 1, names[0], f"system {i % 40}")
    for step in range(200):
        chat = rng.choice(chats)
        chat.extend(rng.randrange(10**9) for _ in range(rng.randrange(3)))
        # Every chat begins with one of some system prompts.
        beginning = f"system {chat[0]}"
        common, key, unwell = rng.choice([0, 1]), f"chat {chat[0]}", set(rng.sample(names, rng.choice([0, 0, 0, 1])))
        best = fleet.choose(chat, common, key, unwell, beginning)
        assert best == plain.choose(chat, common, key, unwell, fleet.homes(beginning))
        fleet.sent(chat, common, best, beginning)
        plain.table.sent(chat[common:], best)
        for name in (best, rng.choice(names)):
            plain.loads[name] = rng.randrange(12)
            fleet.set_load(name, plain.loads[name], step / 100)
        if replicas > 2 and step % 50 == 49:
            leaving = names.pop(rng.randrange(len(names)))
            names.append(f"new{step}")
            del plain.loads[leaving]
            plain.table.forget(leaving)
            plain.loads[names[-1]] = 0
            fleet.become(names, SMALL)


def test_the_holder_of_a_chat_is_found_behind_a_beginning_that_many_others_were_sent_later() -> None:
    names = [f"replica{i}" for i in range(20)]
    fleet, _ = make(*names)
    fleet.sent([1, 2, 3], 0, "replica0")
    for i, name in enumerate(names[1:]):
        fleet.sent([1, 100 + i], 0, name)
    assert fleet.choose([1, 2, 3, 4], 0, "k") == "replica0"


def test_what_many_chats_have_in_common_takes_no_room() -> None:
    fleet, table = make("a", "b")
    fleet.sent([1, 2, 3], 2, "a")
    assert len(table) == 1


def test_a_load_that_was_heard_of_long_ago_counts_no_more() -> None:
    fleet, _ = make("a", "b")
    fleet.set_load("a", 9, now=0)
    fleet.set_load("b", 5, now=8)
    fleet.expire(LOAD_EXPIRES_S + 1)
    assert (fleet.load("a"), fleet.load("b")) == (0, 5)


def test_a_replica_that_left_counts_no_more() -> None:
    fleet, _ = make("a", "b")
    fleet.set_load("a", 100, now=0)
    fleet.become(["b"])
    fleet.set_load("a", 100, now=0)
    fleet.set_load("b", 1, now=0)
    assert fleet.choose((), 0, "k") == "b" and fleet.load("a") == 0


def test_routers_that_saw_the_same_keep_a_beginning_on_the_same_few_replicas() -> None:
    names = [f"replica{i}" for i in range(16)]
    fleets = [make(*names)[0], make(*reversed(names))[0]]
    for fleet in fleets:
        for i in range(1000):
            fleet.sent((), 1, "replica0", f"system {i % 100}")
    homes = [[fleet.homes(f"system {i}") for i in range(100)] for fleet in fleets]
    assert homes[0] == homes[1]
    assert {len(found) for found in homes[0]} <= {1, 2, 4} and len(frozenset.union(*homes[0])) == len(names)


def test_chats_with_one_beginning_go_to_its_homes_until_those_are_crowded() -> None:
    names = [f"replica{i}" for i in range(16)]
    fleet, _ = make(*names)
    for i in range(1000):
        fleet.sent((), 1, "replica0", f"system {i % 100}")
    homes = fleet.homes("system 1")
    assert {fleet.choose((), 0, f"chat {i}", (), "system 1") for i in range(100)} == homes
    for name in homes:
        fleet.set_load(name, 100, 0)
    assert not homes & {fleet.choose((), 0, f"chat {i}", (), "system 1") for i in range(100)}


def test_the_only_beginning_lives_everywhere() -> None:
    fleet, _ = make("a", "b", "c", "d", "e", "f", "g", "h")
    for _ in range(100):
        fleet.sent((), 100, "a", "system")
    assert not fleet.homes("system") and not fleet.homes("")


def test_homes_are_of_the_replicas_that_there_are() -> None:
    fleet, _ = make(*(f"replica{i}" for i in range(16)))
    for i in range(1000):
        fleet.sent((), 1, "replica0", f"system {i % 100}")
    before = fleet.homes("system 1")
    fleet.become([f"replica{i}" for i in range(16) if f"replica{i}" not in before], SMALL)
    assert fleet.homes("system 1") and not fleet.homes("system 1") & before


def test_nobody_is_no_choice() -> None:
    fleet, _ = make()
    with pytest.raises(ValueError, match="no replicas"):
        fleet.choose((), 0, "k")


def test_somebody_is_always_within_the_bound() -> None:
    rng = random.Random(3)
    fleet, _ = make("a", "b", "c")
    for _ in range(300):
        fleet.set_load(rng.choice("abc"), rng.randrange(1000), 0)
        assert fleet.choose((), 0, str(rng.random()), {rng.choice("abc")}) in "abc"
