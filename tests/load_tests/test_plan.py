"""Workloads and shapes: what is asked, when, and that a seed fixes both."""

from itertools import islice
from pathlib import Path

import pytest

from load_tests.shapes import Shape, poisson, read_trace, trace_text
from load_tests.workloads import WORKLOADS, Source, draw, parse_mix
from serve_app.protocol import ChatRequest, validate


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_every_workload_is_a_valid_request(name: str) -> None:
    for ask in islice(draw({name: 1}, seed=3), 30):
        validate(ChatRequest, ask.body("m"))


def test_a_seed_fixes_what_is_asked() -> None:
    mix = dict.fromkeys(WORKLOADS, 1.0)
    first, again, other = (list(islice(draw(mix, seed), 40)) for seed in (1, 1, 2))
    assert first == again != other


def test_weights_are_obeyed() -> None:
    asks = list(islice(draw(parse_mix("code=3,whole"), 1), 400))
    assert 0.65 < sum(ask.workload == "code" for ask in asks) / 400 < 0.85


@pytest.mark.parametrize("text", ["poem", "chat=-1", "chat=x", ""])
def test_a_mix_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_mix(text)


def test_lengths_have_a_long_tail_and_obey_the_scale() -> None:
    def lengths(scale: float) -> list[int]:
        source = Source(1, scale)
        return sorted(source.length(100, 0.8, 16, 800) for _ in range(1000))

    full, small = lengths(1.0), lengths(0.1)
    assert 90 < full[500] < 110 and full[950] > 3 * full[500] and full[-1] <= 800
    assert 8 < small[500] < 12


def test_the_shared_prefix_is_the_same_and_the_rest_is_not() -> None:
    asks = list(islice(draw({"shared_prefix": 1}, 1), 20))
    assert len({ask.messages[0]["content"] for ask in asks}) == 1
    assert len({ask.messages[1]["content"] for ask in asks}) > 10


@pytest.mark.parametrize(
    ("shape", "users"),
    [
        (Shape("constant", 8, 10), [8, 8, 8, None]),
        (Shape("ramp", 8, 10), [1, 5, 8, None]),
        (Shape("steps", 8, 10, step_users=3, step_s=2.5), [3, 9 - 1, 8, None]),
        (Shape("spike", 8, 10), [2, 8, 2, None]),
        (Shape("poisson", 8, 10), [1, 1, 1, None]),
    ],
)
def test_users_over_time(shape: Shape, users: list[int | None]) -> None:
    assert [shape.users_at(t) for t in (0, 5, 9, 10)] == users


def test_steps_join_where_the_users_do_not_change() -> None:
    shape = Shape("steps", users=4, duration_s=10, step_users=2, step_s=2)
    assert shape.steps() == [(0.0, 2.0, 2), (2.0, 10, 4)]


@pytest.mark.parametrize("wrong", [{"kind": "saw"}, {"duration_s": 1e6}, {"users": 0}, {"rate": 0}])
def test_a_shape_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Shape(**{"kind": "constant", **wrong})  # type: ignore[arg-type]


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    times = list(poisson(50, 100, seed=1))
    assert times == list(poisson(50, 100, seed=1)) == sorted(times)
    assert abs(len(times) - 5000) < 4 * 5000**0.5


def test_a_trace_is_read_in_order_and_shares_text_by_block(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = '{{"timestamp": {at}, "input_length": 400, "output_length": 7, "hash_ids": [1, {last}]}}\n'
    file.write_text(row.format(at=2000, last=2) + row.format(at=1000, last=3))
    first, second = read_trace(file, speed=2)
    assert (first.at_s, second.at_s) == (0.5, 1.0)
    source = Source(1)
    one, two = (trace_text(r, 1.0, lambda rng, words: source.passage(words, rng)).split("\n") for r in (first, second))
    assert one[0] == two[0] and one[1] != two[1]


@pytest.mark.parametrize("line", ["{}", "[]", "x", ""])
def test_a_trace_that_is_none_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError):
        read_trace(file)
