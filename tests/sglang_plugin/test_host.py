"""What the host does less of per step, each against the longer way."""

from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from serve_app.sglang_plugin.args import Options

PAGE_SIZES = [1, 4]


def batch(lengths: list[int], allocated: list[int], page: int, free: int, row: int = 400, limit: int = 300) -> Any:
    reqs = [
        SimpleNamespace(
            kv_committed_len=length, kv=SimpleNamespace(kv_allocated_len=have), origin_input_ids=array("q", [1] * 5),
            sampling_params=SimpleNamespace(max_new_tokens=limit),
        )
        for length, have in zip(lengths, allocated, strict=True)
    ]  # fmt: skip
    return SimpleNamespace(
        reqs=reqs, device="cpu", req_pool_indices=torch.arange(len(reqs)),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page, available_size=lambda: free),
        tree_cache=SimpleNamespace(evictable_size=lambda: 0),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, row)), seq_lens_cpu=None, seq_lens_sum=None,
    )  # fmt: skip


@pytest.fixture
def reserve(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prepares a decode step of 9 slots; what it asked the allocator for: one (from, to) per request, or None."""
    from serve_app.sglang_plugin import inputs

    asked: list[Any] = []

    def allocate(
        tree_cache: Any, pool: Any, *, reqs: Any, cur_kv_lens_cpu: Any, nxt_kv_lens_cpu: Any, **rest: Any
    ) -> None:
        assert rest["num_needed_tokens"] == int((nxt_kv_lens_cpu - cur_kv_lens_cpu).sum())
        asked.append(list(zip(cur_kv_lens_cpu.tolist(), nxt_kv_lens_cpu.tolist(), strict=True)))
        for req, following in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
            req.kv.kv_allocated_len = following

    widths = SimpleNamespace(speculative_num_draft_tokens=9, speculative_dflash_block_size=6)
    monkeypatch.setattr(inputs, "get_server_args", lambda: widths)
    monkeypatch.setattr(inputs, "alloc_for_spec_decode", allocate)

    def step(made: Any) -> Any:
        asked.clear()
        state = inputs.DDTreeDraftInput.of(torch.zeros(len(made.reqs)), torch.zeros(len(made.reqs)))
        state.prepare_for_decode(made)
        assert state.reserved_seq_lens_cpu.tolist() == [req.kv.kv_allocated_len for req in made.reqs]
        assert made.seq_lens_cpu.tolist() == [req.kv_committed_len for req in made.reqs]
        return asked[0] if asked else None

    return step


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_a_pool_without_room_gives_two_steps_and_no_more(reserve: Any, page: int) -> None:
    assert reserve(batch([10, 30], [10, 60], page, free=100)) == [(10, 28), (60, 60)]


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_a_pool_with_room_is_asked_once_for_many_steps(reserve: Any, page: int) -> None:
    made = batch([10, 31], [10, 60], page, free=10_000)
    calls = 0
    for _ in range(50):
        calls += reserve(made) is not None
        for req in made.reqs:
            assert req.kv.kv_allocated_len >= req.kv_committed_len + 18 and req.kv.kv_allocated_len % page == 0
            req.kv_committed_len += 4
    assert calls == 2, "200 tokens in portions of 128"


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_a_reserve_ends_with_the_answer_and_with_the_row(reserve: Any, page: int) -> None:
    assert reserve(batch([10], [10], page, free=10_000, limit=20)) == [(10, 43 if page == 1 else 44)]
    assert reserve(batch([30], [40], page, free=10_000, row=100)) == [(40, 100)]
    assert reserve(batch([90], [100], page, free=10_000, row=108)) == [(100, 108)], "what the step needs comes first"


def test_a_step_result_reaches_the_host_in_one_copy(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.sglang_plugin import inputs
    from serve_app.sglang_plugin.commit import CommitBuffers

    made = CommitBuffers.allocate(5, width=4, path=3, device="cpu")
    made.result.copy_(torch.arange(30))
    outcome = made.outcome(2)
    copies: list[int] = []

    def copied(tensor: Any) -> Any:
        copies.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(inputs, "_async_d2h", copied)
    recorded: list[int] = []
    result = inputs.StepResult(
        next_token_ids=outcome.tokens, accept_lens=outcome.lengths, flat=outcome.flat,
        copy_done=SimpleNamespace(record=lambda: recorded.append(len(copies))),
    )  # fmt: skip
    expected = outcome.tokens.tolist(), outcome.lengths.tolist()
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    outcome.flat.zero_()
    assert (result.next_token_ids.tolist(), result.accept_lens.tolist()) == expected
    assert expected == ([0, 1, 2, 3, 4, 5], [15, 16])
    assert copies == [30] and recorded == [1]


def test_isolation_undoes_and_keeps_alive_what_sglangs_does(sglang: ModuleType) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from serve_app.sglang_plugin.isolation import Isolation

    def isolated(ours: bool, overlap: bool) -> tuple[dict[str, Any], list[Any], int]:
        info, tokens = SimpleNamespace(copy_for_forward=lambda: "forward only"), torch.arange(3)
        running = ScheduleBatch(reqs=[], input_ids=tokens, seq_lens_sum=7, sampling_info=info)
        running.spec_algorithm = SimpleNamespace(is_none=lambda: False)
        scheduler = Scheduler.__new__(Scheduler)
        scheduler.batch_record_buf, scheduler.batch_record_ct = [None, None], 0
        around = Scheduler._forward_isolation.__wrapped__
        with Isolation(scheduler, running, overlap) if ours else around(scheduler, running, overlap=overlap):
            assert running.sampling_info == "forward only"
            running.input_ids, running.seq_lens_sum, running.new_to_it = None, 9, True
        assert running.sampling_info is info and running.input_ids is tokens
        kept = scheduler.batch_record_buf[scheduler.batch_record_ct] or [None, []]
        assert kept[0] is (running if overlap else None)
        values = list(kept[1]) + kept[2:]
        assert not overlap or (any(value is tokens for value in values) and "forward only" in values)
        return (
            {**vars(running), "sampling_info": 0, "spec_algorithm": 0, "input_ids": 0},
            values,
            scheduler.batch_record_ct,
        )

    for overlap in (True, False):
        ours, theirs = isolated(True, overlap), isolated(False, overlap)
        assert ours[0] == theirs[0] and ours[2] == theirs[2] == int(overlap)


def test_a_block_in_which_nothing_can_end_is_not_looked_at_token_by_token(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.sglang_plugin import hooks

    monkeypatch.setattr(hooks, "_running", lambda: object())
    params = SimpleNamespace(
        stop_strs=[], stop_regex_strs=[], max_new_tokens=20, ignore_eos=False, stop_token_ids={8}
    )  # fmt: skip
    tokenizer = SimpleNamespace(eos_token_id=9, additional_stop_token_ids={7})

    def looks(ids: list[int], **changes: Any) -> int:
        """How often SGLang is asked about the last four of `ids`."""
        asked: list[int] = []
        fields = {"grammar": None, "tokenizer": tokenizer, "eos_token_ids": {6}, "vocab_size": 10, "to_finish": None}
        req = SimpleNamespace(
            **fields | changes, output_ids=array("q", ids), sampling_params=params, finished_len=None,
            finished=lambda: False,
        )  # fmt: skip
        hooks.finish_state(lambda request, count: asked.append(count), req, 4)
        assert list(req.output_ids) == ids
        return len(asked)

    assert looks([9, 8, 7, 1, 2, 3, 4]) == 0, "the tokens before the block were looked at before"
    for end in (6, 7, 8, 9):
        assert looks([1, 2, 3, end, 4]) == 4
    assert looks([1, 2, 10, 3]) == looks([1, -1, 2, 3]) == 4, "no token of the vocabulary"
    assert looks([1] * 20) == 4, "the limit is reached"
    assert looks([1, 2, 3, 4], grammar=object()) == 4
    for field in ("stop_strs", "stop_regex_strs"):
        setattr(params, field, ["x"])
        assert looks([1, 2, 3, 4]) == 4
        setattr(params, field, [])
    params.ignore_eos = True
    assert looks([1, 2, 9, 8]) == 0


def test_series_get_in_portions_what_they_would_have_got_at_once(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import CollectorRegistry

    from serve_app.metrics import StepMetrics
    from serve_app.sglang_plugin import metrics

    def exporter() -> tuple[CollectorRegistry, Any]:
        registry = CollectorRegistry()
        made = metrics.Exporter(StepMetrics(registry, "m", 6, ["no_runner"]), Options(9, 3, 5))
        monkeypatch.setattr(metrics, "_exporter", made)
        return registry, made

    def values(registry: CollectorRegistry) -> dict[Any, float]:
        found = {(s.name, *s.labels.items()): s.value for family in registry.collect() for s in family.samples}
        return {key: value for key, value in found.items() if not key[0].endswith("_created")}

    rows = [(accepted, accepted + 1) for accepted in (0, 2, 2, 4, 3)] * 20
    at_once, direct = exporter()
    for accepted, emitted in rows:
        direct.metrics.verify_step(accepted, emitted, accepted + 1, 8)
        direct.metrics.graph_replay("draft", 1, 4)
        direct.metrics.step_preparation("direct")
    in_portions, made = exporter()
    running = SimpleNamespace(output_ids=[], finished_len=None, is_retracted=False, finished=lambda: False)
    for turn, (accepted, emitted) in enumerate(rows, 1):
        record = metrics.StepRecord.before(SimpleNamespace(reqs=[running]))
        running.output_ids += [1] * emitted
        metrics.graph_replay("draft", 1, 4)
        metrics.preparation("direct")
        record.after(SimpleNamespace(num_correct_drafts_per_req_cpu=[accepted]))
        assert made.owed == turn % metrics.STEPS_OWED
    assert values(in_portions) != values(at_once)
    ended = SimpleNamespace(output_ids=[], finished_len=None, is_retracted=False, finished=lambda: True)
    metrics.StepRecord.before(SimpleNamespace(reqs=[ended])).after(SimpleNamespace(num_correct_drafts_per_req_cpu=[0]))
    assert values(in_portions) == values(at_once), "nothing is owed once a request has ended"
