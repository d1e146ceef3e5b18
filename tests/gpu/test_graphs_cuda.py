"""Real CUDA capture and replay, and the draft-tree core on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve_app.ddtree.accept import accept_walk, committed_tokens
from serve_app.ddtree.best_first import best_first
from serve_app.ddtree.kv import compaction_grid
from serve_app.ddtree.mask import ancestor_mask
from serve_app.ddtree.tree import build_tree, build_tree_reference
from serve_app.graphs import CudaCapturer, FallbackReason, GraphRunner, StaticBuffers
from tests.ddtree.trees import assert_same, random_drafts, row
from tests.test_graph_batch import POISON
from tests.toy_forward import FIELDS, ToyForward, changed, toy_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Rig:
    def __init__(self, breaks_at: tuple[int, int] | None = None) -> None:
        self.toy = ToyForward("cuda")
        self.counted: list[Any] = []
        self.buffers: dict[int, StaticBuffers] = {}
        self.calls = 0
        self.breaks_at = breaks_at

        def forward(buffers: StaticBuffers, rows: int) -> Any:
            self.calls += 1
            self.buffers[buffers.width] = buffers
            logits, extra = self.toy(buffers.as_batch(rows, "verify"))
            if (buffers.width, rows) == self.breaks_at:
                logits.sum().item()  # a synchronisation: not permitted while capturing
            return logits, extra

        self.runner = GraphRunner(
            forward, device="cuda", batch_sizes=[1, 2, 4], widths=[1, 5], fields=FIELDS,
            on_replay=lambda role, padding, size: self.counted.append(padding),
            on_fallback=lambda role, reason: self.counted.append(reason),
        )  # fmt: skip
        self.runner.capture()

    def check(self, batch_size: int, width: int, seed: int = 0) -> None:
        for buffers in self.buffers.values():
            for tensor in buffers.tensors.values():
                tensor.fill_(POISON[tensor.dtype])
        batch = toy_batch(batch_size, width, seed, "cuda")
        logits, extra = self.runner.run(batch, self.toy)
        wanted_logits, wanted_extra = ToyForward("cuda")(batch)
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(extra["pooled"], wanted_extra["pooled"], rtol=1e-4, atol=1e-4)


def test_replays_equal_eager_at_every_shape() -> None:
    rig = Rig()
    for seed in range(3):
        for batch_size in (1, 2, 3, 4):
            for width in (1, 5):
                rig.check(batch_size, width, seed)
    assert rig.counted == [0, 0, 0, 0, 1, 1, 0, 0] * 3


def test_a_replay_runs_no_python_of_the_forward() -> None:
    rig = Rig()
    calls = rig.calls
    rig.check(3, 5)
    assert rig.calls == calls


def test_a_missing_field_runs_eagerly() -> None:
    rig = Rig()
    batch = changed(toy_batch(2, 5, device="cuda"), out_cache_loc=None)
    assert rig.runner.run(batch, lambda _: "eager") == "eager"
    assert rig.counted == [FallbackReason.MISSING_FIELD]


def test_host_tensors_are_refused() -> None:
    assert Rig().runner.fallback_reason(toy_batch(2, 5)) is FallbackReason.FIELD_DEVICE


def test_a_forward_that_cannot_be_captured_falls_back_and_leaves_the_others() -> None:
    rig = Rig(breaks_at=(5, 2))
    for batch_size, width in ((1, 5), (2, 5), (4, 5), (2, 1)):
        rig.check(batch_size, width)
    assert rig.counted == [0, 2, 0, 0]


def test_random_numbers_still_work_after_a_failed_capture() -> None:
    Rig(breaks_at=(1, 1))  # the last shape: no later capture tidies up
    assert torch.rand(3, device="cuda").shape == (3,)


def test_a_failed_capture_can_be_repaired_by_capturing_again() -> None:
    rig = Rig(breaks_at=(5, 4))
    rig.breaks_at = None
    rig.runner.capture()
    rig.check(4, 5)
    assert rig.counted == [0]


def test_captures_again_after_release() -> None:
    rig = Rig()
    for _ in range(2):
        rig.runner.release()
        rig.runner.capture()
        rig.check(3, 5)


@pytest.mark.parametrize("budget", [0, 8, 32, 64, 256])
@pytest.mark.parametrize("quantum", [0.0, 0.25])
def test_trees_equal_the_heap(budget: int, quantum: float) -> None:
    made = random_drafts(budget, 3, 15, 8, quantum=quantum, holes=0.1)
    tree = build_tree(made.roots.cuda(), made.tokens.cuda(), made.logps.cuda(), budget)
    for index in range(3):
        reference = build_tree_reference(int(made.roots[index]), made.tokens[index], made.logps[index], budget)
        assert_same(row(tree, index), reference)


@pytest.mark.parametrize("table_limit", [None, 0])
def test_a_whole_step_can_be_captured(table_limit: int | None) -> None:
    """Build, mask, walk and moves in one graph: nothing synchronises with the host."""
    made = random_drafts(1, 2, 15, 8, quantum=0.25)
    roots, tokens, logps = made.roots.cuda(), made.tokens.cuda(), made.logps.cuda()
    posterior = torch.randint(0, 50, (2, 33), device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        chosen = best_first(logps, 32, True, table_limit=table_limit)
        tree = build_tree(roots, tokens, logps, 32)
        accepted = accept_walk(tree.tokens, tree.parents, posterior, 15)
        moves = compaction_grid(roots, accepted)
        return (chosen.columns, tree.tokens, ancestor_mask(tree.parents), *vars(accepted).values(), *moves)

    replay = CudaCapturer(torch.device("cuda")).capture(step)
    other = random_drafts(2, 2, 15, 8, quantum=0.25)
    for buffer, values in ((roots, other.roots), (tokens, other.tokens), (logps, other.logps)):
        buffer.copy_(values)
    for captured, eager in zip(replay(), step(), strict=True):
        assert torch.equal(captured, eager)


def test_emitted_tokens_come_back_from_the_device() -> None:
    made = random_drafts(3, 2, 4, 3)
    tree = build_tree(made.roots.cuda(), made.tokens.cuda(), made.logps.cuda(), 6)
    accepted = accept_walk(tree.tokens, tree.parents, tree.tokens, 4)
    host = accept_walk(tree.tokens.cpu(), tree.parents.cpu(), tree.tokens.cpu(), 4)
    assert committed_tokens(tree.tokens, accepted) == committed_tokens(tree.tokens.cpu(), host)
