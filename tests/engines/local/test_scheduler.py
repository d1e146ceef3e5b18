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


def test_probes_that_wait_for_their_slot_hold_up_nobody() -> None:
    scheduler, wanted = Scheduler(1, 64), sequence()
    admitted(scheduler, *(sequence(probe=True) for _ in range(3)), wanted)
    assert wanted.slot == 0 and scheduler.queued == 0 and len(scheduler.everything()) == 4


def test_probes_wait_in_their_order_and_can_leave() -> None:
    scheduler, probes = Scheduler(1, 64), [sequence(probe=True) for _ in range(3)]
    admitted(scheduler, *probes)
    assert [probe.slot for probe in probes] == [1, None, None]
    assert scheduler.remove(probes[1]) and scheduler.remove(probes[0])
    scheduler.admit()
    assert probes[2].slot == 1 and scheduler.remove(probes[2]) and scheduler.idle


def pieces(scheduler: Scheduler) -> Iterator[list[tuple[int, int]]]:
    while found := scheduler.prefill():
        yield [(piece.start, piece.end) for piece in found]
        for piece in found:
            piece.sequence.committed = piece.end


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = Scheduler(2, 10)
    admitted(scheduler, sequence(23))
    assert list(pieces(scheduler)) == [[(0, 10)], [(10, 20)], [(20, 23)]]


def test_a_probe_does_not_wait_for_long_prompts() -> None:
    scheduler = Scheduler(2, 10)
    admitted(scheduler, sequence(13), sequence(12))
    admitted(scheduler, sequence(1, probe=True))
    assert list(pieces(scheduler)) == [[(0, 1)], [(0, 10)], [(10, 13)], [(0, 10)], [(10, 12)]]


def test_short_prompts_share_a_forward_padding_included() -> None:
    scheduler = Scheduler(4, 12)
    admitted(scheduler, sequence(4), sequence(6), sequence(4))
    assert list(pieces(scheduler)) == [[(0, 4), (0, 6)], [(0, 4)]]


def test_only_prefilled_sequences_decode_ordered_by_slot() -> None:
    scheduler, all_ = Scheduler(3, 64), [sequence() for _ in range(3)]
    admitted(scheduler, *all_)
    all_[2].committed = all_[0].committed = 4
    assert scheduler.decode() == [all_[0], all_[2]]
