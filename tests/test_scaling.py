"""How many replicas a load asks for."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.config import load_config
from serve_app.engines.base import EngineStats
from serve_app.errors import ConfigError
from serve_app.scaling import BUSY, TTFT, BusyPolicy, FirstTokens, busy, desired, hurried


def test_waiting_requests_count_like_running_ones() -> None:
    assert busy(EngineStats(running=8, queued=4, slots=8)) == 1.5


def test_long_contexts_count_by_the_memory_they_hold() -> None:
    assert busy(EngineStats(running=1, queued=0, slots=8, kv_tokens_used=90, kv_tokens_total=100)) == 0.9


def test_a_load_at_the_target_asks_for_no_change() -> None:
    assert desired([0.7, 0.7, 0.7], 0, 0.7) == pytest.approx(3)


def test_a_full_fleet_with_a_queue_asks_for_more() -> None:
    assert desired([1.5, 1.5], 0.5, 0.7) == pytest.approx(5)


def context(reported: dict[str, float], replicas: int, queued: float = 0, **late: float) -> Any:
    return SimpleNamespace(
        aggregated_metrics={BUSY: reported, TTFT: late}, current_num_replicas=replicas, target_num_replicas=replicas,
        total_queued_requests=queued,
    )  # fmt: skip


def test_before_anybody_reports_nothing_changes() -> None:
    assert BusyPolicy(0.7, 8)(context({}, 3)) == (3, {})


def test_a_replica_that_has_not_reported_is_taken_to_be_like_the_others() -> None:
    assert BusyPolicy(0.5, 8)(context({"a": 0.5, "b": 0.5}, 3))[0] == pytest.approx(3)


def test_the_number_follows_a_day_of_traffic() -> None:
    """Requests in the system rise and fall; the fleet shares them evenly."""
    policy, replicas, seen = BusyPolicy(0.7, 8), 1, []
    for hour in range(48):
        load = 30 * (1 - math.cos(hour * math.pi / 12))
        shares = {str(i): load / replicas / 8 for i in range(replicas)}
        replicas = max(1, math.ceil(policy(context(shares, replicas))[0]))
        seen.append((load, replicas))
    assert all(load / replicas / 8 <= 0.71 for load, replicas in seen)
    assert max(replicas for _, replicas in seen) == math.ceil(60 / 8 / 0.7) and seen[24][1] == 1


@pytest.mark.parametrize(
    ("ttft_s", "replicas"),
    [(3.0, 15), (1.25, 12.5), (1.0, 10), (0.6, 10), (0.5, 8)],
    ids=["half as many more at most", "later than the target", "at the target", "above half of it", "early enough"],
)
def test_first_tokens_ask_for_more_and_let_a_few_go(ttft_s: float, replicas: float) -> None:
    assert hurried(2, 10, ttft_s, 1) == replicas


def test_first_tokens_let_one_of_two_go_and_never_fewer_stay_than_the_busy_need() -> None:
    assert (hurried(0.1, 2, 0.1, 1), hurried(1.9, 2, 0.1, 1)) == (1, 1.9)


def test_first_tokens_count_where_there_is_a_target() -> None:
    slow = context({"a": 0.1, "b": 0.1}, 2, a=4.0, b=2.0)
    assert BusyPolicy(0.7, 8, target_ttft_s=2.5)(slow)[0] == pytest.approx(2.4)
    assert BusyPolicy(0.7, 8)(slow)[0] < 1


def test_where_nobody_asked_first_tokens_say_nothing() -> None:
    assert BusyPolicy(0.5, 8, target_ttft_s=2)(context({"a": 0.25}, 1)) == (0.5, {})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nine_first_tokens_in_ten_come_within_what_it_says() -> None:
    clock = Clock()
    tokens = FirstTokens(100, clock)
    for took in range(1, 21):
        tokens.arrived(took)
        clock.now += took
        tokens.came(took)
    clock.now = 100
    assert tokens.late() == 18


def test_what_came_before_the_window_is_forgotten() -> None:
    clock = Clock()
    tokens = FirstTokens(10, clock)
    tokens.arrived("a")
    tokens.came("a")
    clock.now = 11
    assert tokens.late() is None


def test_who_still_waits_counts_and_who_left_does_not() -> None:
    clock = Clock()
    tokens = FirstTokens(10, clock)
    tokens.arrived("a")
    tokens.arrived("b")
    clock.now = 60
    assert tokens.late() == 60
    tokens.left("a")
    tokens.came("b")
    tokens.left("b")
    assert tokens.late() == 60
    clock.now = 71
    assert tokens.late() is None


def test_who_has_only_just_arrived_makes_first_tokens_no_earlier() -> None:
    clock = Clock()
    tokens = FirstTokens(100, clock)
    for took in (2, 3):
        tokens.arrived(took)
        clock.now += took
        tokens.came(took)
    for key in range(50):
        tokens.arrived(f"new {key}")
    assert tokens.late() == 3
    # They have all waited longer than the first took, and it is not known how much longer.
    clock.now += 2.5
    assert tokens.late() == 3
    clock.now += 1.5
    assert tokens.late() == 4


def test_one_in_ten_that_waits_says_no_more_than_one_in_ten_that_came_late() -> None:
    clock = Clock()
    tokens = FirstTokens(1000, clock)
    tokens.arrived("stuck")
    for key in range(9):
        tokens.arrived(key)
        clock.now += 1
        tokens.came(key)
    assert tokens.late() == 1
    tokens.arrived("stuck too")
    clock.now += 5
    assert tokens.late() == 14


class Prefilling:
    """A replica that computes one prompt at a time, in half a second, and has slots to spare."""

    PREFILL_S, SLOTS = 0.5, 64

    def __init__(self, clock: Clock) -> None:
        self.tokens, self.queue = FirstTokens(10, clock), [0.0][:0]

    def step(self, now: float) -> list[float]:
        """Times to first token of what came until now; `queue` holds arrivals, and this is called twice a second."""
        if not self.queue:
            return []
        arrived = self.queue.pop(0)
        self.tokens.came(arrived)
        return [now - arrived]


def trace(target_ttft_s: float | None) -> tuple[list[float], list[int]]:
    """An hour in which the rate of long prompts rises from 0.5 to 12 per second and falls again: times to first token,
    and the number of replicas every ten seconds. As Serve's delays have it, there are more when they were asked for
    twice in a row, and fewer when they were for a minute; a new one serves ten seconds later."""
    rng, clock = random.Random(5), Clock()
    policy = BusyPolicy(0.7, Prefilling.SLOTS, target_ttft_s)
    fleet, wanted, more, fewer = [Prefilling(clock)], 1, 0, 0
    ttfts: list[float] = []
    numbers = []
    for tick in range(7200):
        clock.now = tick / 2
        rate = 0.5 + 11.5 * math.sin(math.pi * tick / 7200) ** 2
        for index in range(sum(rng.random() < rate / 40 for _ in range(20))):
            least = min(fleet, key=lambda replica: len(replica.queue))
            least.queue.append(clock.now + index * 1e-6)
            least.tokens.arrived(least.queue[-1])
        clock.now += 0.5
        for replica in fleet:
            ttfts += replica.step(clock.now)
        if tick % 20 == 0:
            fleet = resized(fleet, wanted, clock)
            shares = {str(i): len(r.queue) / Prefilling.SLOTS for i, r in enumerate(fleet)}
            late = {str(i): at for i, r in enumerate(fleet) if (at := r.tokens.late()) is not None}
            asked = min(20, max(1, math.ceil(policy(context(shares, len(fleet), **late))[0])))
            more = more + 1 if asked > len(fleet) else 0
            fewer = fewer + 1 if asked < len(fleet) else 0
            wanted = asked if more == 2 or fewer == 6 else len(fleet)
            more, fewer = more % 2, fewer % 6
            numbers.append(len(fleet))
    return ttfts, numbers


def resized(fleet: list[Prefilling], wanted: int, clock: Clock) -> list[Prefilling]:
    leaving = [replica for replica in fleet if not replica.queue][: max(0, len(fleet) - wanted)]
    staying = [replica for replica in fleet if replica not in leaving]
    return staying + [Prefilling(clock) for _ in range(wanted - len(fleet))]


def test_long_prompts_get_replicas_by_their_first_tokens() -> None:
    ttfts, numbers = trace(2)
    assert sum(took <= 2 for took in ttfts) > 0.9 * len(ttfts)
    assert 6 <= max(numbers) <= 12 and numbers[-1] <= 2


def test_how_busy_slots_are_does_not_see_long_prompts() -> None:
    ttfts, _ = trace(None)
    assert sum(took <= 2 for took in ttfts) < 0.5 * len(ttfts)


def test_the_first_number_lies_within_the_bounds() -> None:
    with pytest.raises(ConfigError, match="between"):
        load_config({"autoscaling": {"max_replicas": 2}, "replica": {"num_replicas": 3}}, use_env=False)
