"""What SGLang asks a speculative algorithm: which built-in branches DDTREE shares, and its widths.

DDTREE drafts as DFLASH does (one block per forward, draft KV made of target features), so it is of the DFLASH family;
its verify step is a tree, which the hooks and the worker take care of.

What this module does not do: run anything.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo


class DDTreeAlgo(CustomSpecAlgo):
    """The registered algorithm; one instance per process."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        # The drafter writes one block at the verify step's own slots, no chain per branch.
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, *args, **kwargs)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows per request: the drafter's block, or the target's tree (`num_draft_tokens`)."""
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_server_args

        from serve_app.sglang_plugin.args import options

        return options(get_server_args()).block_size

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        return self.get_num_tokens_per_req_for_target_verify(num_draft_tokens, is_draft_worker)

    def handle_server_args(self, server_args: Any) -> None:
        from serve_app.sglang_plugin.args import resolve_server_args

        resolve_server_args(server_args)


def worker_class(server_args: Any) -> type:
    """The worker factory given to SGLang."""
    from serve_app.sglang_plugin.worker import DDTreeWorker

    return DDTreeWorker
