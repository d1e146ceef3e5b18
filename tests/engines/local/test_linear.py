"""Packed products against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from serve_app.engines.local.linear import Linear, can_pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_packed_equals_plain(dtype: torch.dtype, biased: bool, rows: int) -> None:
    if not can_pack(CPU, dtype):
        pytest.skip("this CPU packs no such weights")
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(48, 32, generator=generator) / 6, torch.randn(48, generator=generator)
    x, other = torch.randn(2, rows, 32, generator=generator), torch.randn(2, rows, 48, generator=generator)
    weight, bias, x, other = (tensor.to(dtype) for tensor in (weight, bias, x, other))
    packed, plain = (Linear(weight, bias if biased else None, packed=packed) for packed in (True, False))
    kept = other.clone()
    rough = 4e-2 if dtype == torch.bfloat16 else 1e-5
    for name, arguments in {"__call__": (x,), "plus": (x, other)}.items():
        got = getattr(packed, name)(*arguments)
        torch.testing.assert_close(got, getattr(plain, name)(*arguments), rtol=rough / 2, atol=rough)
    torch.testing.assert_close(plain(x), F.linear(x, weight, bias if biased else None))
    assert torch.equal(other, kept)
