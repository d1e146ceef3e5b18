"""The books, the growth check and the bodies that must be refused. The soak itself is `make soak`."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from load_tests.books import Books, disagreements, of_clients, of_server, still_held
from load_tests.chaos import invalid_bodies
from load_tests.processes import Sample, below, engines, sample
from load_tests.scrape import parse
from load_tests.soak import FD_ROOM, Round, growth
from load_tests.timeline import Outcome
from tests.direct import direct_client

PAGE = """gateway_requests_total{{route="/v1/chat/completions",status="200",replica="i"}} {ok}
gateway_requests_total{{route="/v1/chat/completions",status="499",replica="i"}} {left}
gateway_requests_total{{route="/v1/chat/completions",status="503",replica="i"}} {broke}
gateway_requests_total{{route="/metrics",status="200",replica="i"}} 17
ddtree_requests_total{{outcome="stop",replica="e"}} {ok}
ddtree_requests_total{{outcome="length",replica="e"}} 0
ddtree_requests_total{{outcome="abort",replica="e"}} {left}
ddtree_emitted_tokens_total{{phase="prefill",replica="e"}} 99
ddtree_emitted_tokens_total{{phase="verify",replica="e"}} {tokens}
"""
ALL = {"engines": True, "tokens": True}


def server(ok: int, left: int, tokens: int, broke: int = 0) -> Books:
    before = parse(PAGE.format(ok=3, left=1, tokens=10, broke=0))
    return of_server(before, parse(PAGE.format(ok=3 + ok, left=1 + left, tokens=10 + tokens, broke=broke)))


def outcomes(ok: int, left: int, broke: int = 0) -> list[Outcome]:
    done = [Outcome("chat", 0.0, status=200, completion_tokens=5) for _ in range(ok)]
    gone = [Outcome("abandon", 0.0, status=200, abandoned=True) for _ in range(left)]
    return done + gone + [Outcome("chat", 0.0, status=200, failure="error_frame:replica_lost") for _ in range(broke)]


def test_books_that_agree() -> None:
    assert disagreements(of_clients(outcomes(2, 1), Counter()), server(2, 1, 8), **ALL) == []


@pytest.mark.parametrize(
    ("books", "word"),
    [
        (server(3, 1, 8), "requests"),
        (server(2, 2, 8), "aborted"),
        (server(2, 1, 9), "tokens"),
        (server(2, 1, 8, broke=1), "status"),
    ],
)
def test_books_that_do_not(books: Books, word: str) -> None:
    assert word in " ".join(disagreements(of_clients(outcomes(2, 1), Counter()), books, **ALL))


def test_refusals_are_on_both_sides() -> None:
    clients = of_clients(outcomes(2, 1), Counter({"400": 4}))
    assert len(disagreements(clients, server(2, 1, 8), **ALL)) == 1


def test_a_stream_that_broke_is_a_failure_on_both_sides() -> None:
    clients = of_clients(outcomes(2, 1, broke=1), Counter())
    assert disagreements(clients, server(2, 1, 8, broke=1), **ALL) == []


def test_what_is_held_is_named() -> None:
    assert still_held(parse('ddtree_running_requests{replica="e"} 0\nddtree_kv_tokens_used 3\n')) == [
        "ddtree_kv_tokens_used is 3"
    ]


def rounds(*samples: Sample, series: int = 10) -> list[Round]:
    return [Round("calm", series=series, samples=[one]) for one in samples]


def test_what_stays_is_no_growth_and_a_new_process_starts_afresh() -> None:
    steady = [Sample(1, "engine", 1000, 50), Sample(1, "engine", 1100, 52), Sample(2, "engine", 900_000, 90)]
    assert growth(rounds(*steady)) == []


def test_a_process_that_came_in_mid_round_is_measured_from_its_first_full_one() -> None:
    old, young, full = Sample(1, "engine", 1000, 50), Sample(2, "engine", 1000, 50), Sample(2, "engine", 500_000, 50)
    later = Sample(2, "engine", 900_000, 50)
    assert growth(rounds(old, young, full)) == []
    assert "memory" in growth(rounds(old, young, full, later))[0]


def test_growth_is_named() -> None:
    grown = rounds(Sample(1, "engine", 1000, 50), Sample(1, "engine", 500_000, 51 + FD_ROOM))
    assert [line.split(": ")[1].split(" from")[0] for line in growth(grown)] == ["file descriptors", "memory"]
    more = [*rounds(*[Sample(1, "ingress", 1, 1)] * 3), *rounds(Sample(1, "ingress", 1, 1), series=11)]
    assert growth(more) == ["series from 10 to 11"]


def test_processes_below_one_are_found_and_measured() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in below(os.getpid())
        (one,) = [here for here in sample(os.getpid()) if here.pid == child.pid]
        assert one.fds >= 3 and one.rss_kib > 0
        assert engines(os.getpid()) == []
    finally:
        child.kill()
        child.communicate()


# The fake engine has no tokenizer, and so no limit on a prompt.
FITTING = [case for case in invalid_bodies("fake") if b"word word" not in case[0]]


@pytest.mark.parametrize(("body", "kind", "status"), FITTING, ids=range(len(FITTING)))
async def test_every_invalid_body_is_refused_as_the_soak_expects(body: bytes, kind: str, status: int) -> None:
    async with direct_client() as client:
        answer = await client.post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status
