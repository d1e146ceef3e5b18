"""Where requests go, as a pure function."""

import random

import pytest

from serve_app.router.scoring import Candidate, Policy, choose, load_bound

POLICY = Policy()


def best(*candidates: Candidate, key: str = "k") -> str:
    return choose(candidates, key, POLICY)


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
    assert best(Candidate("a", 0, 1.0, healthy=False), Candidate("b", 50)) == "b"


def test_where_all_are_unhealthy_one_is_tried() -> None:
    assert best(Candidate("a", 0, 0.9, healthy=False), Candidate("b", 0, healthy=False)) == "a"


def test_a_chat_has_one_home_whoever_computes_it() -> None:
    names = [f"replica{i}" for i in range(8)]
    homes = [best(*(Candidate(n, 0) for n in random.sample(names, 8)), key="chat") for _ in range(20)]
    assert len(set(homes)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_replica_is_chosen_beyond_the_bound_unless_all_are(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        candidates = [Candidate(str(i), rng.randrange(12), rng.choice([0, 0, rng.random()])) for i in range(6)]
        loads = {c.name: c.ongoing for c in candidates}
        chosen = choose(candidates, str(rng.random()), POLICY)
        assert loads[chosen] <= load_bound(sum(loads.values()), 6, POLICY)
