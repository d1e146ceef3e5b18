"""How many replicas a load asks for."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.config import load_config
from serve_app.engines.base import EngineStats
from serve_app.errors import ConfigError
from serve_app.scaling import BusyPolicy, busy, desired


def test_waiting_requests_count_like_running_ones() -> None:
    assert busy(EngineStats(running=8, queued=4, slots=8)) == 1.5


def test_long_contexts_count_by_the_memory_they_hold() -> None:
    assert busy(EngineStats(running=1, queued=0, slots=8, kv_tokens_used=90, kv_tokens_total=100)) == 0.9


def test_a_load_at_the_target_asks_for_no_change() -> None:
    assert desired([0.7, 0.7, 0.7], 0, 0.7) == pytest.approx(3)


def test_a_full_fleet_with_a_queue_asks_for_more() -> None:
    assert desired([1.5, 1.5], 0.5, 0.7) == pytest.approx(5)


def context(reported: dict[str, float], replicas: int, queued: float = 0) -> Any:
    return SimpleNamespace(
        aggregated_metrics={"busy": reported}, current_num_replicas=replicas, target_num_replicas=replicas,
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


def test_the_first_number_lies_within_the_bounds() -> None:
    with pytest.raises(ConfigError, match="between"):
        load_config({"autoscaling": {"max_replicas": 2}, "replica": {"num_replicas": 3}}, use_env=False)
