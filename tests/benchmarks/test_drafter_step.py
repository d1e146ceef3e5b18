"""The training step against naive references: blocks and masks, labels, the loss's gradient, optimiser, resuming."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.drafter import plain
from benchmarks.drafter.decode import Pool
from benchmarks.drafter.drafter import Blocks, DrafterShape, forward, initial, load_checkpoint, save_checkpoint
from benchmarks.drafter.muon import newton_schulz
from benchmarks.drafter.step import LossMix, Trainer, choose_anchors, choose_slots, slot_labels
from benchmarks.drafter.target import rope_tables, tiny_target
from benchmarks.drafter.train import Run, learning_rate, parser
from serve_app.models.draft_reference import DraftReference

TARGET = tiny_target()
SHAPE = DrafterShape(TARGET.shape, layers=2, block=8, mask_id=3, layer_ids=(0, 2))
LENGTH, HIDDEN = 40, TARGET.shape.hidden


def make_pool(rows: int = 6, seed: int = 0) -> Pool:
    """Random text: two chats a row, replies in the middle of each."""
    gen = torch.Generator().manual_seed(seed)
    pool = Pool.allocate(rows, LENGTH, 2 * HIDDEN, HIDDEN, torch.device("cpu"), torch.float32)
    pool.features.copy_(torch.randn(pool.features.shape, generator=gen))
    pool.last.copy_(torch.randn(pool.last.shape, generator=gen))
    pool.tokens.copy_(torch.randint(4, TARGET.shape.vocab, (rows, LENGTH), generator=gen))
    pool.start[:, 22:] = 22
    pool.label[:, 5:20] = 1
    pool.label[:, 26:36] = 1
    pool.label[0, 9] = 0
    return pool


def make_trainer(pool: Pool, mix: LossMix | None = None) -> Trainer:
    torch.manual_seed(0)
    return Trainer(SHAPE, initial(SHAPE), TARGET, pool, torch.ones(2 * HIDDEN), mix or LossMix(), plain, 4, 5, 3)


def test_blocks_equal_the_reference_drafter(tmp_path: Path) -> None:
    weights = {k: v.bfloat16().float() for k, v in initial(SHAPE).items()}
    scale = torch.full((2 * HIDDEN,), 0.5)
    folded = {**weights, "fc": weights["fc"] * 2}  # training sees half the features through twice the matrix
    save_checkpoint(folded, SHAPE, scale, tmp_path)
    reference = DraftReference.load(tmp_path, TARGET.embed, TARGET.embed)
    pool = make_pool()
    cos, sin = rope_tables(TARGET.shape, LENGTH + SHAPE.block, torch.device("cpu"))
    anchors = torch.tensor([6, 19, 12])
    blocks = Blocks(
        anchors.int(), torch.zeros(3).int(), torch.full((3,), SHAPE.block).int(), pool.tokens[1, anchors].long()
    )
    hidden = forward(folded, SHAPE, TARGET.embed, pool.features[1:2] * scale, blocks, cos, sin, plain)
    want = torch.cat(list(reference.logits(pool.features[1], pool.tokens[1].long(), anchors)))
    got = F.linear(hidden.view(3, SHAPE.block, -1)[:, 1:], TARGET.embed)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    weights = {k: v.bfloat16().float() for k, v in initial(SHAPE).items()}
    save_checkpoint(weights, SHAPE, torch.ones(2 * HIDDEN), tmp_path, shard_bytes=20_000)
    shape, got = load_checkpoint(tmp_path, TARGET.shape)
    assert shape == SHAPE
    assert all(torch.equal(got[k], v) for k, v in weights.items())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_a_block_sees_neither_other_chats_nor_its_anchor_nor_slots_beyond_its_length() -> None:
    pool = make_pool()
    trainer = make_trainer(pool)
    rows, anchor = torch.tensor([2]), torch.tensor([[28]])
    blocks = trainer.blocks(pool, rows, anchor, torch.tensor([[4]]))
    before = trainer.hidden(pool, rows, blocks).view(SHAPE.block, -1)[:4]
    pool.features[2, :22] += 5
    pool.features[2, 28:] -= 5
    again = trainer.hidden(pool, rows, blocks).view(SHAPE.block, -1)[:4]
    torch.testing.assert_close(again, before)
    pool.features[2, 24] += 5
    assert not torch.allclose(trainer.hidden(pool, rows, blocks).view(SHAPE.block, -1)[:4], before)


def test_labels_equal_a_loop_over_the_text() -> None:
    pool = make_pool()
    rows = torch.tensor([0, 3])
    anchor = torch.tensor([[5, 8, 18, 33], [6, 17, 27, 39]])
    valid = torch.tensor([[True] * 4, [True, True, False, True]])
    got = slot_labels(pool, rows, anchor, valid, SHAPE.block)
    for r, row in enumerate(rows.tolist()):
        for a, at in enumerate(anchor[r].tolist()):
            want = []
            for k in range(1, SHAPE.block):
                alive = bool(valid[r, a]) and at + k < LENGTH and bool(pool.label[row, at + 1 : at + k + 1].all())
                want.append(int(pool.tokens[row, at + k]) if alive else -1)
            assert got[r, a].tolist() == want


def test_anchors_are_learned_tokens_with_a_learned_successor() -> None:
    pool = make_pool()
    rows = torch.arange(6)
    anchor, valid = choose_anchors(pool, rows, 30)
    good = {(r, i) for r in range(6) for i in range(LENGTH - 1) if pool.label[r, i] and pool.label[r, i + 1]}
    chosen = [(r, int(a)) for r in range(6) for a, ok in zip(anchor[r], valid[r], strict=True) if ok]
    assert set(chosen) == good and len(chosen) == len(good)


def test_sampled_slots_stand_for_all_of_them() -> None:
    depth, times = choose_slots(4000, 16, True, torch.device("cpu"))
    weight = torch.zeros(16).index_add(0, depth.reshape(-1), times.expand_as(depth).reshape(-1)) / 4000
    assert depth[:, :5].tolist() == [[1, 2, 3, 4, 5]] * 4000
    assert (depth[:, 1:] > depth[:, :-1]).all()
    torch.testing.assert_close(weight[1:], torch.ones(15), rtol=0.1, atol=0)


@pytest.mark.parametrize("hard,reach", [(1.0, 0.0), (0.4, 0.5)])
def test_the_gradient_is_that_of_the_naive_loss(hard: float, reach: float) -> None:
    trainer = make_trainer(make_pool(), LossMix(hard=hard, reach=reach))
    gen = torch.Generator().manual_seed(4)
    blocks, k, s = 7, 3, SHAPE.block
    hidden = torch.randn(blocks * s, HIDDEN, generator=gen, requires_grad=True)
    depth = torch.tensor([1, 2, 5]).expand(blocks, -1)
    pick = (torch.arange(blocks)[:, None] * s + depth).view(-1)
    before = torch.randint(0, 6 * LENGTH, (blocks * k,), generator=gen)
    label = torch.randint(0, TARGET.shape.vocab, (blocks, k), generator=gen).int()
    label[2, 1:] = -1
    base, tau = torch.rand(blocks, k, generator=gen), torch.rand(blocks, k, generator=gen) + 0.5
    got = trainer._head(hidden.detach(), pick, before, label, base, depth, tau)

    loss = torch.zeros(())
    logp = torch.log_softmax(F.linear(hidden, TARGET.embed), -1).view(blocks, s, -1)
    soft = torch.softmax(
        F.linear(trainer.pool.last.view(-1, HIDDEN)[before], TARGET.embed).view(blocks, k, -1) / tau[..., None], -1
    )
    for b in range(blocks):
        right: list[float] = []
        for j, d in enumerate(depth[b].tolist()):
            if label[b, j] < 0:
                break
            own = logp[b, d, int(label[b, j])]
            weight = math.exp(reach * (d - 1) * sum(right) / len(right)) if right else 1.0
            cross = -(hard * own + (1 - hard) * (soft[b, j] * logp[b, d]).sum())
            loss = loss + base[b, j] * weight * cross / base.sum()
            right.append(float(own.detach()))
    torch.testing.assert_close(got, torch.autograd.grad(loss, hidden)[0], rtol=1e-3, atol=1e-6)


def test_newton_schulz_flattens_the_singular_values() -> None:
    out = newton_schulz(torch.randn(2, 24, 60, generator=torch.Generator().manual_seed(1)))
    values = torch.linalg.svdvals(out.float())
    assert values.min() > 0.4 and values.max() < 1.4


def test_a_few_steps_learn_a_fixed_text() -> None:
    pool = make_pool()
    pool.tokens[:] = torch.arange(LENGTH) % 7 + 4
    trainer = make_trainer(pool, LossMix(hard=1.0))
    trainer.opt.lr.fill_(0.01)
    losses = []
    for _ in range(30):
        trainer.stats.zero_()
        trainer.run("train_step")
        losses.append(-(trainer.stats[2, 1] / trainer.stats[0, 1]).item())
    assert losses[-1] < 0.3 * losses[0]


def test_the_rate_is_constant_and_then_falls() -> None:
    rates = [learning_rate(t, 100, 1.0, 0.6, 5) for t in (0, 2.5, 5, 59, 80, 100, 200)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 0.5, 0.02, 0.02], abs=1e-6)


def write_streams(folder: Path) -> None:
    from tests.benchmarks.test_drafter_decode import END, START, pack_control, stream

    stream([[9 + i % 90 + START, 5, 40, pack_control(20), END] for i in range(200)]).save(folder / "text.npz")
    stream([[9 + i + START, 6, pack_control(16), END] for i in range(3)]).save(folder / "eval.npz")


def test_a_second_call_resumes_weights_optimiser_clock_and_place(tmp_path: Path) -> None:
    write_streams(tmp_path)
    line = f"--device cpu --tiny --stream {tmp_path}/text.npz --eval-stream {tmp_path}/eval.npz"
    line += f" --state {tmp_path}/state.safetensors"
    line += (
        f" --out {tmp_path}/out --rows 3 --slots 2 --length 40 --eval-length 24 --batch-rows 2 --anchors 3 --layers 1"
    )
    line += " --layer-ids 0 2 --mask-id 3 --chunk-blocks 4 --reserve 0 --call-seconds 600"
    args = parser().parse_args(line.split())
    first = Run(args)
    for slot in range(2):
        first.write_slot(slot)
    first.train(3)
    first.save()
    again = Run(args)
    assert again.steps == first.steps == 3
    assert again.spent == first.spent and again.place == int(first.writer.next_chat)
    for name, value in first.trainer.masters.items():
        assert torch.equal(again.trainer.masters[name], value)
        torch.testing.assert_close(again.trainer.opt.buffer[name], first.trainer.opt.buffer[name], rtol=0.01, atol=1e-6)
    assert (tmp_path / "out" / "config.json").exists()
