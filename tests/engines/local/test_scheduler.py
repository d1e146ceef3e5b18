"""Who gets a slot, and how much prompt a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from serve_app.engines.base import SamplingParams
from serve_app.engines.local.scheduler import Scheduler
from serve_app.engines.local.sequence import Sequence
from serve_app.engines.local.stopping import TextStream


def sequence(length: int = 4, *, probe: bool = False) -> Sequence:
    text = cast(TextStream, None)  # the scheduler never looks at it
    return Sequence(0, [0] * length, SamplingParams(), 0, text, lambda item: None, 9, probe)


def admitted(scheduler: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        scheduler.add(one)
    scheduler.admit()


def test_first_come_first_served_lowest_slot_first() -> None:
    scheduler, all_ = Scheduler(2, 64), [sequence() for _ in range(3)]
    admitted(scheduler, *all_)
    assert [one.slot for one in all_] == [0, 1, None]
    scheduler.remove(all_[0])
    scheduler.admit()
    assert all_[2].slot == 0


def test_a_removed_sequence_frees_its_place_wherever_it_is() -> None:
    scheduler, all_ = Scheduler(1, 64), [sequence() for _ in range(2)]
    admitted(scheduler, *all_)
    assert [scheduler.remove(one) for one in all_] == [True, True]
    assert scheduler.idle and scheduler.free == 1
    assert not scheduler.remove(all_[0])


def test_a_probe_passes_the_queue_into_its_own_slot() -> None:
    scheduler = Scheduler(1, 64)
    admitted(scheduler, sequence(), sequence())
    probes = [sequence(probe=True), sequence(probe=True)]
    admitted(scheduler, *probes)
    assert sorted(str(probe.slot) for probe in probes) == ["1", "None"]


def pieces(scheduler: Scheduler) -> Iterator[list[tuple[int, int]]]:
    while found := scheduler.prefill():
        yield [(piece.start, piece.end) for piece in found]
        for piece in found:
            piece.sequence.committed = piece.end


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = Scheduler(2, 10)
    admitted(scheduler, sequence(23))
    assert list(pieces(scheduler)) == [[(0, 10)], [(10, 20)], [(20, 23)]]


def test_short_prompts_share_a_forward_padding_included() -> None:
    scheduler = Scheduler(4, 12)
    admitted(scheduler, sequence(4), sequence(6), sequence(4))
    assert list(pieces(scheduler)) == [[(0, 4), (0, 6)], [(0, 4)]]


def test_a_probe_does_not_wait_for_the_end_of_a_long_prompt() -> None:
    """Else the engine would be taken for stuck while it makes every step."""
    scheduler, probe = Scheduler(2, 10), sequence(1, probe=True)
    admitted(scheduler, sequence(23))
    steps = pieces(scheduler)
    assert next(steps) == [(0, 10)]
    admitted(scheduler, probe)
    assert next(steps) == [(0, 1)] and next(steps) == [(10, 20)]


def test_only_prefilled_sequences_decode_ordered_by_slot() -> None:
    scheduler, all_ = Scheduler(3, 64), [sequence() for _ in range(3)]
    admitted(scheduler, *all_)
    all_[2].committed = all_[0].committed = 4
    assert scheduler.decode() == [all_[0], all_[2]]
