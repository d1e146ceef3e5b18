"""SGLang's own DFLASH draft model on a CPU, as a program: blocks in, hidden states out.

    python -m tests.sglang_plugin.draft_model CASES.pt RESULT.pt TARGET DRAFTER

The model class, its weight loader, norms, projections, rotary embedding and the context's projections are SGLang's. Its
attention needs a KV pool and a backend; here a plain softmax over context and block stands in for them.

What this module does not do: compare (`test_drafter_parity` does), or run SGLang's scheduler.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.conftest import free_port


class PlainAttention(nn.Module):
    """In the place of SGLang's RadixAttention: the block sees the context and itself, in both directions."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.context: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any) -> Tensor:
        assert self.context is not None
        split = (-1, self.kv_heads, self.head_dim)
        groups = self.heads // self.kv_heads
        keys, values = (
            torch.cat((before.view(split), now.view(split))).repeat_interleave(groups, 1)
            for before, now in zip(self.context, (k, v), strict=True)
        )
        scores = torch.einsum("ihd,jhd->hij", q.view(-1, self.heads, self.head_dim), keys) * self.head_dim**-0.5
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).flatten(1)


def load(target: str, drafter: str) -> Any:
    """The model with the checkpoint's weights, in float32."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_transformers_utils import get_config

    arguments = ServerArgs(model_path=target, device="cpu", dtype="float32", attention_backend="torch_native")
    publish(arguments, role="scheduler")
    where = f"tcp://127.0.0.1:{free_port()}"
    init_distributed_environment(1, 0, distributed_init_method=where, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    torch.set_default_dtype(torch.float32)
    model = DFlashDraftModel(get_config(drafter, trust_remote_code=False))
    model.load_weights(
        safetensors_weights_iterator([str(file) for file in sorted(Path(drafter).glob("*.safetensors"))])
    )
    for layer in model.layers:
        own = layer.self_attn
        own.attn = PlainAttention(own.num_heads, own.num_kv_heads, own.head_dim)
    return model.eval()


@torch.inference_mode()
def hidden_states(model: Any, features: Tensor, embedded: Tensor) -> Tensor:
    """[b, hidden] of a block behind its context, as SGLang's worker calls the model.

    Args:
        features: [T, n·hidden], the context's. embedded: [b, hidden], the block's embeddings.
    """
    context, places = model.project_target_hidden(features), torch.arange(len(features))
    for layer in model.layers:
        own = layer.self_attn
        k, v = own.kv_proj_only(context)
        own.attn.context = own.apply_k_rope(places, own.apply_k_norm(k)), v
    positions = torch.arange(len(features), len(features) + len(embedded))
    return model(None, positions, None, input_embeds=embedded).hidden_states


def main(cases: str, result: str, target: str, drafter: str) -> None:
    torch.set_num_threads(1)
    model = load(target, drafter)
    torch.save([hidden_states(model, *case) for case in torch.load(cases)], result)


if __name__ == "__main__":
    main(*sys.argv[1:])
