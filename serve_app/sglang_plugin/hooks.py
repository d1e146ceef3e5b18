"""The places where SGLang 0.5.17 offers no seam, each with what it would do to a tree if left alone.

Every hook first asks whether DDTREE is the running algorithm: with any other the original is called unchanged. Three
mend SGLang's DFLASH too: `chain_mask_policy`, `extra_context_len` and `draft_embeds`.

What this module does not do: import SGLang's runtime at its own import (targets are strings; SGLang resolves them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.sglang_plugin.args import early_defaults, is_ddtree, is_dflash, slots_per_step


@dataclass(frozen=True)
class Hook:
    """One hook: SGLang's dotted `target`, our `function`, and SGLang's HookType by name."""

    target: str
    function: Callable[..., Any]
    kind: str


def _running() -> Any:
    """This process's server arguments if they select DDTREE, else None."""
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    return server_args if is_ddtree(server_args) else None


def before_post_init(server_args: Any, *args: Any, **kwargs: Any) -> None:
    if is_ddtree(server_args):
        early_defaults(server_args)


def alloc_len_per_decode(original: Callable[..., int], server_args: Any = None) -> int:
    """A step writes max(width, block) slots; SGLang knows the width only."""
    length = original(server_args)
    ddtree = server_args if is_ddtree(server_args) else _running() if server_args is None else None
    return max(length, slots_per_step(ddtree)) if ddtree else length


def extra_context_len(original: Callable[..., int], server_args: Any) -> int:
    """Two steps are reserved ahead, page-aligned. A shorter row lets the last request's slots run into the next row, as
    DFLASH's do where pages are one token."""
    extra = original(server_args)
    if is_ddtree(server_args):
        return max(extra, 2 * slots_per_step(server_args) + server_args.page_size)
    if is_dflash(server_args):
        return max(extra, 2 * int(server_args.speculative_num_draft_tokens) + server_args.page_size)
    return extra


def prompt_graph_sizes(original: Callable[..., list[int]], server_args: Any, max_bs: int) -> list[int]:
    """SGLang captures no prompt below four tokens and replays none that is less than half full. One whose beginning is
    cached may have a single new token: a question asked again, another choice of it, an answer resumed, a health check.
    """
    sizes = original(server_args, max_bs)
    if not sizes or not is_ddtree(server_args):
        return sizes
    # Compiled pieces would be specialised for a size of one.
    return sizes if server_args.cuda_graph_config.prefill.backend == "tc_piecewise" else sorted({1, 2, *sizes})


def validate_request(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """DFLASH refuses logprobs; DDTREE has them. Penalties would need one state per tree path."""
    if _running() is None:
        return original(req, enable_overlap)
    if req.return_hidden_states:
        return "DDTREE does not return hidden states."
    params = req.sampling_params
    for name, neutral in (("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)):
        if getattr(params, name, neutral) != neutral:
            return f"{name} is not supported with DDTREE speculative decoding."
    if getattr(params, "min_new_tokens", 0):
        return "min_new_tokens is not supported with DDTREE speculative decoding."
    return None


def need_hidden_states(original: Callable[..., bool], server_args: Any = None) -> bool:
    """Nothing but the bonus token is relayed to the next step; SGLang decides by the algorithm's name."""
    ddtree = is_ddtree(server_args) if server_args is not None else _running() is not None
    return False if ddtree else original(server_args)


def decode_runner_class(original: Callable[..., type], model_runner: Any) -> type:
    """The target's verify graph must be captured with a tree mask: DFLASH's is captured as a causal chain."""
    if model_runner.is_draft_worker or not is_ddtree(model_runner.server_args):
        return original(model_runner)
    from serve_app.sglang_plugin.graph import verify_runner_class

    return verify_runner_class()


def chain_mask_policy(original: Callable[..., tuple[str, bool]], backend: Any) -> tuple[str, bool]:
    """Whether DFLASH's verify graphs read a mask is asked of the backend that verifies.

    SGLang goes by the class's name and does not look into the pair of a prompts' and a steps' backend, for which it
    captures a mask that no step writes: drafts then see those behind them, and wrong ones are accepted.
    """
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    while True:
        if isinstance(backend, HybridAttnBackend):
            backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
        elif (inner := getattr(backend, "full_attn_backend", None)) is not None:
            backend = inner
        else:
            return original(backend)


def forward_raw(original: Callable[..., Any], model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Count the forward once, as replay or with the reason why not (can_run_graph itself runs twice per verify)."""
    verify = forward_batch.forward_mode.is_target_verify() and is_ddtree(model_runner.server_args)
    output = original(model_runner, forward_batch, *args, **kwargs)
    if verify:
        from serve_app.sglang_plugin.graph import count_forward

        count_forward(model_runner, forward_batch, output.can_run_graph)
    return output


def draft_embeds(original: Callable[..., dict[str, Any]], model_runner: Any, forward_batch: Any, *args: Any) -> Any:
    """SGLang casts given embeddings to bfloat16 when it runs eagerly, which a float16 drafter cannot multiply."""
    kwargs = original(model_runner, forward_batch, *args)
    ours = is_ddtree(model_runner.server_args) or is_dflash(model_runner.server_args)
    if forward_batch.input_embeds is not None and model_runner.is_draft_worker and ours:
        kwargs["input_embeds"] = forward_batch.input_embeds
    return kwargs


def triton_graph_state(
    original: Callable[..., None], backend: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
) -> None:
    _bounded("bound_triton_state", original, backend, max_bs, max_num_tokens, args, kwargs)


def flashinfer_graph_state(
    original: Callable[..., None], backend: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
) -> None:
    _bounded("bound_flashinfer_state", original, backend, max_bs, max_num_tokens, args, kwargs)


def _bounded(
    name: str, original: Callable[..., None], backend: Any, max_bs: int, max_num_tokens: int, args: Any, kwargs: Any
) -> None:
    """SGLang's index buffer would be rows × context; a caller that brings buffers of its own keeps them."""
    if args or kwargs or _running() is None:
        return original(backend, max_bs, max_num_tokens, *args, **kwargs)
    from serve_app.sglang_plugin import graph

    getattr(graph, name)(original, backend, max_bs, max_num_tokens)
    return None


def captured_metadata(original: Callable[..., None], backend: Any, *args: Any, **kwargs: Any) -> None:
    """The step's own kernel has written what this would write for the forward that is about to be replayed."""
    from serve_app.sglang_plugin.plan import take_plan

    if not take_plan(backend):
        original(backend, *args, **kwargs)


def batch_result(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """Record what reached the clients: only here is it known where a stop or a limit cut the accepted tokens."""
    if not is_ddtree(processor.server_args):
        return original(processor, batch, result)
    from serve_app.sglang_plugin.metrics import StepRecord

    record = StepRecord.before(batch)
    original(processor, batch, result)
    record.after(result)
    return None


def prefill_result(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """Count prompt tokens, and first tokens that reached the clients (a chunk in the middle of a prompt has none)."""
    if not is_ddtree(processor.server_args):
        return original(processor, batch, result)
    from serve_app.sglang_plugin import metrics

    lengths = result.extend_input_len_per_req
    computed = sum(batch.extend_lens if lengths is None else lengths)
    before = [(req, len(req.output_ids)) for req in batch.reqs]
    original(processor, batch, result)
    metrics.prefill(computed, sum(len(req.output_ids) - length for req, length in before))
    return None


def forward_isolation(original: Callable[..., Any], scheduler: Any, batch: Any, *, overlap: bool) -> Any:
    """The same, faster; the batch's fields are looked up once per process."""
    if not is_ddtree(scheduler.server_args):
        return original(scheduler, batch, overlap=overlap)
    from serve_app.sglang_plugin.isolation import Isolation

    return Isolation(scheduler, batch, overlap)


def finish_state(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Look for the end of the answer token by token, as it is looked for without drafts.

    SGLang asks about a whole accepted block at once, and asks for the limit first: an end-of-sequence token that is
    accepted in the block that crosses max_new_tokens would be answered together with what follows it, and of two stops
    in a block the first of the kinds would win, not the first of the text.
    """
    if new_accepted_len <= 1 or req.finished() or req.to_finish or _running() is None:
        return original(req, new_accepted_len)
    if _goes_on(req, new_accepted_len):
        return None
    ids, grammar = req.output_ids, req.grammar
    later = ids[1 - new_accepted_len :]
    del ids[1 - new_accepted_len :]
    req.grammar = None  # it has taken the whole block already and speaks of its last token only
    seen = 0
    try:
        while True:
            if seen == len(later):
                req.grammar = grammar
            original(req, 1)
            if req.finished() or seen == len(later):
                break
            ids.append(later[seen])
            seen += 1
        if req.finished() and req.finished_len is None:
            req.finished_len = len(ids)
    finally:
        req.grammar = grammar
        ids.extend(later[seen:])
    return None


def _goes_on(req: Any, count: int) -> bool:
    """Whether none of the last `count` tokens can end the answer, so that there is nothing to look for one by one."""
    params, ids = req.sampling_params, req.output_ids
    if req.grammar is not None or params.stop_strs or params.stop_regex_strs or len(ids) >= params.max_new_tokens:
        return False
    tokens = ids[-count:]
    if min(tokens) < 0 or max(tokens) >= req.vocab_size:
        return False
    if params.ignore_eos:
        return True
    ends = getattr(req, "ddtree_ends", None)
    if ends is None:
        ends = req.ddtree_ends = _end_tokens(req)
    return ends.isdisjoint(tokens)


def _end_tokens(req: Any) -> frozenset[int]:
    """Every token that ends the answer; a tokenizer takes its time to say."""
    ends = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        ends |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return frozenset(ends)


_SRT = "sglang.srt."
_PROCESSOR = _SRT + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
HOOKS = (
    Hook(_SRT + "server_args.ServerArgs.__post_init__", before_post_init, "BEFORE"),
    Hook(_SRT + "server_args.ServerArgs._generate_prefill_cuda_graph_batch_sizes", prompt_graph_sizes, "AROUND"),
    Hook(_SRT + "mem_cache.allocation_sizing.get_alloc_len_per_decode", alloc_len_per_decode, "AROUND"),
    Hook(_SRT + "mem_cache.allocation_sizing.get_req_to_token_extra_context_len", extra_context_len, "AROUND"),
    Hook(_SRT + "speculative.dflash_utils.validate_dflash_request", validate_request, "AROUND"),
    Hook(_SRT + "speculative.spec_utils.spec_need_hidden_states", need_hidden_states, "AROUND"),
    Hook(_SRT + "model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls", decode_runner_class, "AROUND"),
    Hook(_SRT + "speculative.dflash_utils.resolve_dflash_verify_mask_policy", chain_mask_policy, "AROUND"),
    Hook(_SRT + "model_executor.model_runner.ModelRunner._forward_raw", forward_raw, "AROUND"),
    Hook(_SRT + "model_executor.model_runner.ModelRunner._extend_forward_kwargs", draft_embeds, "AROUND"),
    Hook(
        _SRT + "layers.attention.triton_backend.TritonAttnBackend.init_cuda_graph_state", triton_graph_state, "AROUND"
    ),
    Hook(
        _SRT + "layers.attention.triton_backend.TritonAttnBackend._apply_cuda_graph_metadata",
        captured_metadata,
        "AROUND",
    ),
    Hook(
        _SRT + "layers.attention.flashinfer_backend.FlashInferAttnBackend.init_cuda_graph_state",
        flashinfer_graph_state,
        "AROUND",
    ),
    Hook(_SRT + "managers.scheduler.Scheduler._forward_isolation", forward_isolation, "AROUND"),
    Hook(_SRT + "managers.schedule_batch.Req.update_finish_state", finish_state, "AROUND"),
    Hook(_PROCESSOR + ".process_batch_result_prefill", prefill_result, "AROUND"),
    Hook(
        _PROCESSOR + ".process_batch_result_decode",
        batch_result,
        "AROUND",
    ),
)
