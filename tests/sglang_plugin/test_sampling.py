from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from serve_app.sglang_plugin.sampling import restrict, sample_nodes

VOCAB, WIDTH = 12, 3


def info(**changes: Any) -> SimpleNamespace:
    size = 2
    fields = {
        "is_all_greedy": False, "temperatures": torch.ones(size, 1), "top_ks": torch.full((size,), 1 << 30),
        "top_ps": torch.ones(size), "min_ps": torch.zeros(size), "sampling_seed": None, "need_top_k_sampling": False,
        "need_top_p_sampling": False, "need_min_p_sampling": False,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def naive(probs: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """SGLang's torch sampler for one row: what it may draw, sorted out by hand."""
    order = probs.argsort(descending=True)
    kept, mass = torch.zeros_like(probs), 0.0
    for rank, token in enumerate(order.tolist()):
        if rank < top_k and mass <= top_p:
            kept[token] = probs[token]
        mass += float(probs[token])
    return torch.where(kept >= kept.max() * min_p, kept, 0.0)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (VOCAB, 0.6, 0.0), (4, 0.8, 0.3), (1, 0.1, 0.9)])
def test_limits_are_those_of_sglangs_torch_sampler(top_k: int, top_p: float, min_p: float) -> None:
    probs = torch.randn(6, VOCAB).softmax(-1)
    limits = torch.full((6,), top_k), torch.full((6,), top_p), torch.full((6,), min_p)
    expected = torch.stack([naive(row, top_k, top_p, min_p) for row in probs])
    torch.testing.assert_close(restrict(probs, *limits, joint=True), expected)


def test_greedy_batches_take_the_argmax() -> None:
    logits = torch.randn(2 * WIDTH, VOCAB)
    assert torch.equal(
        sample_nodes(logits, info(is_all_greedy=True), WIDTH, torch.zeros(6), backend="pytorch"), logits.argmax(-1)
    )


def test_a_greedy_request_stays_greedy_among_sampled_ones() -> None:
    logits = torch.zeros(2 * WIDTH, VOCAB)  # all equal: only argmax is deterministic
    mixed = info(top_ks=torch.tensor([1, VOCAB]), need_top_k_sampling=True)
    drawn = torch.stack([sample_nodes(logits, mixed, WIDTH, torch.zeros(6), backend="pytorch") for _ in range(20)])
    assert (drawn[:, :WIDTH] == 0).all() and (drawn[:, WIDTH:] != 0).any()


def test_every_node_is_sampled_from_its_own_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2 * WIDTH, VOCAB)
    asked = info(temperatures=torch.tensor([[0.7], [1.3]]))
    draws = torch.stack([sample_nodes(logits, asked, WIDTH, torch.zeros(6), backend="pytorch") for _ in range(4000)])
    for node in range(2 * WIDTH):
        expected = (logits[node] / (0.7 if node < WIDTH else 1.3)).softmax(-1).double()
        counts = draws[:, node].bincount(minlength=VOCAB).double()
        assert chisquare(counts.numpy(), (expected / expected.sum() * counts.sum()).numpy()).pvalue > 1e-4
