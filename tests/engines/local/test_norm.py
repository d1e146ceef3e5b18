"""The fused norm against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from serve_app.engines.local.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_it_equals_torchs_norm(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 5, 576, generator=generator) * scale + scale).to(dtype)
    weight = (1 + torch.randn(576, generator=generator) / 5).to(dtype)
    expected = F.rms_norm(x.double(), (576,), weight.double(), 1e-5)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    got = RMSNorm(weight, 1e-5)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_row_is_the_same_whatever_else_is_normed() -> None:
    x, norm = torch.randn(33, 576).bfloat16(), RMSNorm(torch.ones(576).bfloat16(), 1e-5)
    together = norm(x)
    assert all(torch.equal(norm(x[row : row + 1])[0], together[row]) for row in range(33))
