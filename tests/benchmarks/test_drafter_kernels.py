"""Each Triton kernel equals its plain PyTorch twin, values and gradients. Runs through Triton's interpreter
where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.drafter import plain
from benchmarks.drafter.target import rope_tables, tiny_target

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
from benchmarks.drafter import kernels  # noqa: E402

DEV = torch.device("cuda" if CUDA else "cpu")
LOOSE = 10 if CUDA else 1  # tensor cores multiply fp32 as tf32
SHAPE = tiny_target().shape


def draw(*size: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*size, device=DEV).requires_grad_(grad)


def same(name: str, inputs: list[torch.Tensor], call) -> None:
    """call(ops, *inputs) agrees between kernels and plain, and so do the gradients of every input that wants one."""
    want, got = call(plain, *inputs), call(kernels, *inputs)
    up = torch.randn_like(want)
    leaves = [x for x in inputs if x.requires_grad]
    torch.testing.assert_close(got, want, rtol=2e-3 * LOOSE, atol=2e-3 * LOOSE, msg=lambda m: f"{name}: {m}")
    for a, b in zip(torch.autograd.grad(got, leaves, up), torch.autograd.grad(want, leaves, up), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3 * LOOSE, atol=5e-3 * LOOSE, msg=lambda m: f"{name} gradient: {m}")


def test_add_norm() -> None:
    same(
        "with residual",
        [draw(37, 48), draw(37, 48), draw(48)],
        lambda o, x, y, w: torch.cat(o.add_norm(x, y, w, 1e-5), 1),
    )


def test_add_norm_without_residual() -> None:
    same("alone", [draw(5, 48), draw(48)], lambda o, x, w: o.add_norm(x, None, w, 1e-5)[1])


def test_swiglu() -> None:
    same("swiglu", [draw(9, 2 * 48)], lambda o, z: o.swiglu(z))


def test_head_norm_rope_of_a_column_slice() -> None:
    cos, sin = rope_tables(SHAPE, 64, DEV)
    pos = torch.randint(0, 64, (11,), device=DEV)
    same("rope", [draw(11, 6 * 16), draw(16)], lambda o, x, w: o.head_norm_rope(x[:, 32:], w, cos, sin, pos, 4, 1e-5))


def test_block_attention() -> None:
    rows, anchors, slots, length, hq, hk, size = 2, 3, 16, 70, 6, 2, 16
    ba = rows * anchors
    anchor = torch.tensor([3, 66, 20, 40, 69, 1], device=DEV, dtype=torch.int32)
    start = torch.tensor([0, 30, 20, 0, 5, 0], device=DEV, dtype=torch.int32)
    blen = torch.tensor([16, 8, 16, 8, 16, 16], device=DEV, dtype=torch.int32)
    inputs = [
        draw(ba * slots, hq * size),
        draw(rows * length, hk * size),
        draw(rows * length, hk * size),
        draw(ba * slots, hk * size),
        draw(ba * slots, hk * size),
    ]
    same(
        "attention",
        inputs,
        lambda o, q, kc, vc, kb, vb: o.block_attention(
            q, kc, vc, kb, vb, anchor, start, blen, (slots, length, hq, hk, size)
        ),
    )


@pytest.mark.parametrize("soft", [False, True])
def test_head_loss(soft: bool) -> None:
    blocks, slots, vocab = 3, 4, 5000
    z, zt = draw(blocks * slots, vocab, grad=False) * 3, draw(blocks * slots, vocab, grad=False) * 3
    label = torch.randint(0, vocab, (blocks, slots), device=DEV, dtype=torch.int32)
    label[1, 2:] = -1
    label[2] = -1
    depth = torch.tensor([1, 2, 5, 9], device=DEV).expand(blocks, -1).contiguous()
    base = torch.rand(blocks * slots, device=DEV)
    tau = torch.rand(blocks * slots, device=DEV) + 0.3
    out = []
    for ops in (plain, kernels):
        work = z.clone()
        stats = ops.head_loss_(
            work, zt if soft else None, label.view(-1), base, depth.view(-1), tau, slots, 0.5, 0.3, True
        )
        good = label.view(-1) >= 0
        out.append([work, stats[0][good], stats[1], stats[2]])
    for a, b in zip(*out, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


def test_decode_attention_appends_and_reads_the_cache() -> None:
    rows, hq, hk, length, size = 3, 4, 2, 80, 16
    cos, sin = rope_tables(SHAPE, length, DEV)
    start = torch.tensor([0, 10, 70], device=DEV)
    caches = [torch.randn(rows, hk, length, size, device=DEV) for _ in range(2)]
    pos = torch.tensor([70], device=DEV)
    qkv = draw(rows, (hq + 2 * hk) * size, grad=False)
    results = []
    for ops in (plain, kernels):
        k, v = (c.clone() for c in caches)
        results.append((ops.decode_attention(qkv, k, v, cos, sin, pos, start, hq), k, v))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4 * LOOSE**2)


def test_sample_is_argmax_at_temperature_zero_and_follows_the_softmax_otherwise() -> None:
    logits = draw(1, 8, grad=False).expand(4000 if CUDA else 600, -1).contiguous()
    temp = torch.full((logits.shape[0],), 0.7, device=DEV)
    temp[0] = 0
    got = kernels.sample(logits, temp, torch.tensor([3], device=DEV))
    assert got[0] == logits[0].argmax()
    share = torch.bincount(got, minlength=8).float() / len(got)
    assert (share - torch.softmax(logits[0] / 0.7, 0)).abs().max() < 0.08
