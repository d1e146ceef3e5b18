import pytest
import torch

from tests.sglang_plugin.conftest import DEVICE

pytest.importorskip("triton", reason="the kernels need Triton")
from serve_app.sglang_plugin.topk import CHUNK, topk_logprobs, topk_reference


@pytest.mark.parametrize(("rows", "vocab", "k"), [(3, 100, 1), (2, CHUNK, 4), (4, 2 * CHUNK + 17, 8), (1, 9, 9)])
def test_topk_is_the_references(rows: int, vocab: int, k: int) -> None:
    logits = 4 * torch.randn(rows, vocab, device=DEVICE)
    tokens, logps = topk_logprobs(logits, k)
    expected_tokens, expected_logps = topk_reference(logits, k)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logps, expected_logps, atol=1e-5, rtol=1e-5)


def test_equal_logits_resolve_to_the_smaller_token() -> None:
    logits = torch.zeros(2, 3 * CHUNK, device=DEVICE)
    assert topk_logprobs(logits, 3)[0].tolist() == [[0, 1, 2]] * 2


def test_first_is_argmax_of_bf16_logits() -> None:
    logits = torch.randn(8, 5000, device=DEVICE).to(torch.bfloat16)
    assert torch.equal(topk_logprobs(logits, 4)[0][:, 0].cpu(), logits.cpu().float().argmax(-1))


def test_nan_and_minus_infinity_are_never_first() -> None:
    logits = torch.full((1, 50), float("-inf"), device=DEVICE)
    logits[0, 7], logits[0, 3] = 1.0, float("nan")
    tokens, logps = topk_logprobs(logits, 2)
    assert tokens[0, 0] == 7 and logps[0, 0] == 0 and len(set(tokens[0].tolist())) == 2


class TwoRanks:
    """A tensor-parallel group whose other rank is computed beforehand; ours is rank 0."""

    world_size = 2

    def __init__(self, other: list[torch.Tensor]) -> None:
        self.other = iter(other)

    def all_gather_into_tensor(self, out: torch.Tensor, part: torch.Tensor) -> None:
        out.copy_(torch.cat((part, next(self.other))))


def test_shards_of_the_vocabulary_give_the_whole() -> None:
    logits, k = 3 * torch.randn(4, 6000, device=DEVICE), 5
    sent: list[torch.Tensor] = []

    class Record(TwoRanks):
        def all_gather_into_tensor(self, out: torch.Tensor, part: torch.Tensor) -> None:
            sent.append(part.clone())
            out.copy_(torch.cat((part, part)))

    topk_logprobs(logits[:, 3000:].contiguous(), k, first_id=3000, tp_group=Record([]))
    tokens, logps = topk_logprobs(logits[:, :3000].contiguous(), k, tp_group=TwoRanks(sent))
    expected_tokens, expected_logps = topk_reference(logits, k)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logps, expected_logps, atol=1e-5, rtol=1e-5)
