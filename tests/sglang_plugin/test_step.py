"""The worker's step end to end on a CPU, with forwards that read the caches as attention would.

The target's cache holds (token, position) per slot; its next token depends on every token that a row may see, in order
of position, so that one slot compacted wrongly changes the output. The drafter's cache holds the features it was given.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.sglang_plugin.args import Options
from tests.sglang_plugin.conftest import DEVICE

VOCAB, SLOTS, MASK = 23, 400, 22
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]


def next_token(context: list[int]) -> int:
    state = 7
    for token in context:
        state = (state * 31 + token * 17 + 5) % 1009
    return state % (VOCAB - 1)


class Target:
    """Holds the cache, the request table and the forward."""

    def __init__(self, prompts: list[list[int]], page: int) -> None:
        self.cache = torch.full((SLOTS, 2), -1, dtype=torch.int32)
        self.table = torch.zeros((len(prompts), 96), dtype=torch.int32)
        pages = torch.randperm(SLOTS // page - 1)[: len(prompts) * (96 // page)] + 1
        self.table[:] = (pages[:, None] * page + torch.arange(page)).view(len(prompts), -1)
        for row, prompt in enumerate(prompts):
            self.write(self.table[row, : len(prompt)].long(), torch.tensor(prompt), torch.arange(len(prompt)))

    def write(self, slots: Tensor, tokens: Tensor, positions: Tensor) -> None:
        self.cache[slots] = torch.stack((tokens, positions), 1).int()

    def verify(self, batch: Any, tokens: Tensor, positions: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
        slots = batch.out_cache_loc
        self.write(slots, tokens, positions)
        logits, begin = torch.zeros(len(tokens), VOCAB), 0
        for row, start in enumerate(batch.seq_lens.tolist()):
            cells = mask[begin : begin + width * (start + width)].view(width, start + width)
            begin += cells.numel()
            reach = torch.cat((self.table[row, :start].long(), slots[row * width : (row + 1) * width]))
            for node in range(width):
                seen = self.cache[reach[cells[node].bool()]]
                assert seen[:, 1].tolist() == list(range(len(seen))), "a row sees one token per position"
                logits[row * width + node, next_token(seen[:, 0].tolist())] = 1.0
        return logits, torch.stack((tokens, positions), 1).float()


class Drafter:
    """Guesses the next tokens right with some probability; sees only what its own cache holds."""

    def __init__(self, target: Target, block: int) -> None:
        self.cache, self.target, self.block = torch.full((SLOTS, 2), -1.0), target, block

    def forward(self, batch: Any) -> SimpleNamespace:
        hidden = torch.randn(batch.batch_size, self.block, VOCAB)
        for row, start in enumerate(batch.seq_lens.tolist()):
            known = self.cache[self.target.table[row, :start].long()]
            assert known[:, 1].tolist() == list(range(start)), "features lie at their tokens' positions"
            context = [*known[:, 0].int().tolist(), int(batch.input_ids[row * self.block])]
            for depth in range(1, self.block):
                context.append(next_token(context))
                hidden[row, depth, context[-1]] += 2.5
        return SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=hidden.flatten(0, 1)))


def worker(target: Target, chosen: Options, monkeypatch: pytest.MonkeyPatch) -> Any:
    from serve_app.sglang_plugin import worker as module
    from serve_app.sglang_plugin.commit import CommitBuffers, KVMover
    from serve_app.sglang_plugin.tree import TreeBuffers

    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch")))
    drafter = Drafter(target, chosen.block_size)

    class Toy(module.DDTreeWorker):
        def __init__(self) -> None:
            size = len(target.table)
            self.chosen, self.device, self.block_size = chosen, "cpu", chosen.block_size
            runner = SimpleNamespace(
                req_to_token_pool=SimpleNamespace(req_to_token=target.table),
                attn_backend=SimpleNamespace(verify_mask=None),
                model=SimpleNamespace(get_input_embeddings=lambda: lambda ids: ids[..., None].float()),
            )
            self._target_worker = SimpleNamespace(model_runner=runner)
            self.model_runner, self.draft_model_runner = runner, drafter
            self._draft_block_ids_buf = self._draft_seq_lens_cpu_buf = None
            self._mask_token_id, self._draft_block_spec_info = MASK, None
            self._head = module.Head(torch.eye(VOCAB), 0)
            self._tail_in_draft_graph = self._tail_in_verify_graph = False
            self._trees = TreeBuffers.allocate(size, chosen.width, "cpu")
            self._commit = CommitBuffers.allocate(size, chosen.width, chosen.path, "cpu")
            self._slots = torch.zeros((size, chosen.width), dtype=torch.int64)
            self._offsets = torch.arange(chosen.path)
            self._mover = KVMover([target.cache])
            self._fused_kv_helper = None
            self._planner = SimpleNamespace(begin=lambda size: None, end=lambda: None)
            self._direct = SimpleNamespace(preparation=lambda *asked: "not_in_graphs")

        def _target_forward(self, batch: Any, tree: Any) -> Any:
            logits, features = target.verify(batch, tree.draft_token, tree.positions, tree.custom_mask, chosen.width)
            out = SimpleNamespace(next_token_logits=logits, hidden_states=features)
            return SimpleNamespace(logits_output=out, can_run_cuda_graph=False), None

        def _append_target_hidden_to_draft_kv_by_loc(
            self,
            *,
            target_hidden: Tensor,
            cache_loc: Tensor,
            positions: Tensor,
            cache_loc_2d: Tensor,
            commit_lens: Tensor,
        ) -> None:
            kept = torch.arange(cache_loc_2d.shape[1]) < commit_lens[:, None]
            assert torch.equal(target_hidden[kept.view(-1), 1].long(), positions[kept.view(-1)])
            drafter.cache[cache_loc[kept.view(-1)]] = target_hidden[kept.view(-1)]

    for row, prompt in enumerate(PROMPTS):
        features = torch.stack((torch.tensor(prompt), torch.arange(len(prompt))), 1).float()
        drafter.cache[target.table[row, : len(prompt)].long()] = features
    return Toy()


class Sized(SimpleNamespace):
    def __len__(self) -> int:
        return len(PROMPTS)


def running(lengths: Tensor, draft_input: Any, **sampling: Any) -> SimpleNamespace:
    info = Sized(
        is_all_greedy=True, logit_bias=None, has_custom_logit_processor=False, acc_linear_penalties=None,
        penalizer_orchestrator=None, grammar_mask=None, **sampling,
    )  # fmt: skip
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False), is_extend_in_batch=False,
        seq_lens=lengths, seq_lens_cpu=None, seq_lens_sum=None, req_pool_indices=torch.arange(len(lengths)),
        spec_info=draft_input, sampling_info=info, has_grammar=False, return_logprob=False, reqs=[], out_cache_loc=None,
    )  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU stand-in for the forwards")
@pytest.mark.parametrize("chosen", [Options(9, 3, 5), Options(4, 2, 6), Options(5, 1, 5)], ids=str)
@pytest.mark.parametrize("page", [1, 4])
def test_steps_emit_what_decoding_one_by_one_would(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, chosen: Options, page: int
) -> None:
    from serve_app.sglang_plugin.inputs import DDTreeDraftInput

    torch.manual_seed(page)
    target = Target(PROMPTS, page)
    toy = worker(target, chosen, monkeypatch)
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        text.append(next_token(text))
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    state = DDTreeDraftInput.of(torch.tensor([text[-1] for text in texts]), lengths)
    accepted = []
    phases: list[str] = []
    monkeypatch.setattr("serve_app.sglang_plugin.metrics.phase", lambda name, seconds: phases.append(name))
    for _ in range(7):
        state.reserved_seq_lens_cpu = (lengths + 20).int()
        state.reserved_seq_lens_sum = int(state.reserved_seq_lens_cpu.sum())
        batch = running(lengths, state)
        published: list[Tensor] = []
        result = toy.forward_batch_generation(batch, on_publish=published.append)
        tokens = result.next_token_ids.view(len(PROMPTS), result.speculative_num_draft_tokens)
        for row, length in enumerate(result.accept_lens.tolist()):
            texts[row] += tokens[row, :length].tolist()
            accepted.append(length)
        lengths, state = result.new_seq_lens, result.next_draft_input
        assert torch.equal(published[0], lengths)
    assert phases == ["draft", "verify", "accept"] * 7
    for prompt, text, length in zip(PROMPTS, texts, lengths.tolist(), strict=True):
        expected = list(prompt)
        while len(expected) < len(text):
            expected.append(next_token(expected))
        assert text == expected
        assert length == len(text) - 1, "all but the bonus token are committed"
    assert max(accepted) > 2, "something beyond the first draft was accepted"
