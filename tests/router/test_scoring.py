"""Where requests go, as a pure function."""

import random

import pytest

from serve_app.router.scoring import Candidate, Policy, home_weight, load_bound, rank

POLICY = Policy()


def best(*candidates: Candidate, key: str = "k") -> str:
    return rank(candidates, key, POLICY)[0]


def test_the_longest_prefix_wins() -> None:
    assert best(Candidate("a", 1, 0.3), Candidate("b", 1, 0.9), Candidate("c", 0)) == "b"


def test_a_short_prefix_attracts_nothing() -> None:
    home = best(Candidate("a", 0), Candidate("b", 0))
    other = "b" if home == "a" else "a"
    assert best(Candidate(home, 0), Candidate(other, 0, 0.05)) == home


def test_beyond_the_load_bound_affinity_gives_way_to_the_next_holder() -> None:
    assert best(Candidate("a", 20, 1.0), Candidate("b", 5, 0.5), Candidate("c", 4)) == "b"


def test_where_no_holder_is_free_the_others_take_it() -> None:
    assert best(Candidate("a", 20, 1.0), Candidate("b", 1), Candidate("c", 1)) in ("b", "c")


def test_an_unhealthy_replica_gets_nothing_while_another_is_well() -> None:
    names = rank([Candidate("a", 0, 1.0, healthy=False), Candidate("b", 50)], "k", POLICY)
    assert names == ["b"]


def test_where_all_are_unhealthy_each_is_tried() -> None:
    assert set(rank([Candidate("a", 0, healthy=False), Candidate("b", 0, healthy=False)], "k", POLICY)) == {"a", "b"}


def test_nobody_is_no_choice() -> None:
    assert rank([], "k", POLICY) == []


def test_everybody_healthy_is_ranked_once() -> None:
    rng = random.Random(1)
    candidates = [Candidate(str(i), rng.randrange(30), rng.random()) for i in range(64)]
    assert sorted(rank(candidates, "k", POLICY)) == sorted(c.name for c in candidates)


def test_a_chat_has_one_home_whoever_computes_it() -> None:
    names = [f"replica{i}" for i in range(8)]
    homes = [best(*(Candidate(n, 0) for n in random.sample(names, 8)), key="chat") for _ in range(20)]
    assert len(set(homes)) == 1


def test_chats_spread_over_homes() -> None:
    names = [f"replica{i}" for i in range(8)]
    counts = dict.fromkeys(names, 0)
    for chat in range(4000):
        counts[max(names, key=lambda name: home_weight(f"chat {chat}", name))] += 1
    assert min(counts.values()) > 350 and max(counts.values()) < 650


def test_when_a_replica_goes_only_its_chats_move() -> None:
    names = [f"replica{i}" for i in range(8)]
    for chat in range(500):
        before = max(names, key=lambda name: home_weight(f"chat {chat}", name))
        after = max(names[1:], key=lambda name: home_weight(f"chat {chat}", name))
        assert before in (after, names[0])


@pytest.mark.parametrize("seed", range(5))
def test_no_replica_is_chosen_beyond_the_bound_unless_all_are(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        candidates = [Candidate(str(i), rng.randrange(12), rng.choice([0, 0, rng.random()])) for i in range(6)]
        loads = {c.name: c.ongoing for c in candidates}
        chosen = rank(candidates, str(rng.random()), POLICY)[0]
        assert loads[chosen] <= load_bound(list(loads.values()), POLICY)
