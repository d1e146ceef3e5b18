"""What is left of a job after a part of it was sent."""

from serve_app.engines.base import GenerateRequest, SamplingParams, Usage
from serve_app.protocol import Progress, merge, open_work


def request(n: int = 1, seed: int | None = None) -> GenerateRequest:
    return GenerateRequest("r", SamplingParams(n=n, seed=seed), prompt="p")


def test_parts_of_a_choice_add_up() -> None:
    parts = [Progress(0, (1, 2)), Progress(1, (9,)), Progress(0, (3,), True, Usage(5, 3), (7, b"\xc3"))]
    assert merge(3, parts) == (Progress(0, (1, 2, 3), True, Usage(5, 3), (7, b"\xc3")), Progress(1, (9,)), None)


def test_a_job_from_its_beginning_is_submitted_as_it_is() -> None:
    assert open_work([request(2)], ()) == [(0, None, request(2))]


def test_a_prompt_of_which_nothing_was_sent_keeps_its_choices_together() -> None:
    work = open_work([request(2), request(2)], [Progress(0, (1,)), None, None, None])
    assert [(w.prompt, w.choice) for w in work] == [(0, 0), (0, 1), (1, None)]


def test_each_choice_goes_on_from_its_own_tokens() -> None:
    work = open_work([request(2)], [Progress(0, (1, 2)), Progress(1, (3,))])
    assert [w.request.emitted for w in work] == [(1, 2), (3,)]
    assert [w.request.sampling.n for w in work] == [1, 1]


def test_each_choice_keeps_its_seed() -> None:
    work = open_work([request(3, seed=40)], [Progress(0, (1,)), Progress(1, (1,)), None])
    assert [w.request.sampling.seed for w in work] == [40, 41, 42]


def test_a_finished_choice_is_not_generated_again() -> None:
    work = open_work([request(2)], [Progress(0, (1,), True), Progress(1, (3,))])
    assert [w.choice for w in work] == [1]


def test_request_ids_stay_distinct() -> None:
    work = open_work([request(2)], [Progress(0, (1,)), Progress(1, (1,))])
    assert len({w.request.request_id for w in work}) == 2
