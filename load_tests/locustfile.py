"""The closed loop for Locust's own command line and page: `python -m locust -f load_tests/locustfile.py --host URL`.

What this module does not do: shapes, gate and report; those are `python -m load_tests run`.
"""

from typing import Any

from locust import events

from load_tests.recorder import Load
from load_tests.target import check_loopback, model_of
from load_tests.users import LoadUser
from load_tests.workloads import DEFAULT_MIX, draw, parse_mix

__all__ = ["LoadUser"]


@events.test_start.add_listener
def prepare(environment: Any, **_: Any) -> None:
    base = check_loopback(environment.host or "http://127.0.0.1:8000")
    environment.load = Load(model_of(base), draw(parse_mix(DEFAULT_MIX), seed=1))
