"""What surrounds a started SGLang: prompts, vocabulary and limits, read from SGLang's own view of the model.

What this module does not do: start it (`host`), or import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_app.config import Config
from serve_app.engines.checks import check_sglang
from serve_app.engines.drafter import drafter_path
from serve_app.engines.local.prompts import PromptRenderer
from serve_app.engines.local.token_floor import TokenFloor
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.engines.sglang.arguments import server_arguments
from serve_app.engines.sglang.requests import Offer
from serve_app.engines.sglang.tooling import Tooling, check_parsers, has_grammars
from serve_app.models import resolve
from serve_app.ports import ENGINE_PORTS, free_ports

# SGLang 0.5.17 stops two tokens before the end of the context.
_CONTEXT_KEPT = 2


@dataclass(frozen=True)
class Parts:
    """What the engine needs beside the host.

    Attributes:
        context: tokens of prompt and answer together, at most. longest_prompt: of the prompt alone. kv_tokens: what the
            KV cache holds.
    """

    prompts: PromptRenderer
    vocabulary: Vocabulary
    vocab: int
    context: int
    longest_prompt: int
    kv_tokens: int
    end_tokens: frozenset[int]
    offer: Offer
    tooling: Tooling


def prepare(config: Config) -> dict[str, Any]:
    """Arguments of ServerArgs for a configuration, its models fetched.

    Raises:
        ConfigError: SGLang is not installed or another release than the supported one, or a key cannot be used.
        ModelFetchError: files cannot be had.
    """
    check_sglang()
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from sglang.srt.server_args import ServerArgs

    check_parsers(config.sglang, FunctionCallParser.ToolCallParserEnum, ReasoningParser.DetectorMap)
    files = resolve(config.model.source)
    made = server_arguments(config, files.path, drafter_path(config, files), ServerArgs.__dataclass_fields__)
    # Its ranks meet there some ten seconds from now, and the port that SGLang would choose may be another's by then,
    # above all where a node's replicas start together. Data-parallel ranks each need one of their own.
    if made.get("dp_size", 1) == 1:
        made.setdefault("nccl_port", free_ports(ENGINE_PORTS)[0])
    return made


def parts_of(manager: Any, info: dict[str, Any], templates: Any) -> Parts:
    """What a started TokenizerManager, its scheduler's `info` and its TemplateManager say. Raises ConfigError."""
    tokenizer, model, arguments = manager.tokenizer, manager.model_config, manager.server_args
    vocabulary = Vocabulary(tokenizer)
    kv_tokens = int(info["max_total_num_tokens"])
    context = min(model.context_len, kv_tokens) - _CONTEXT_KEPT
    if arguments.page_size:
        context = min(context, kv_tokens - 2 * arguments.page_size)
    return Parts(
        prompts=PromptRenderer(tokenizer, model.vocab_size, TokenFloor(tokenizer, vocabulary)),
        vocabulary=vocabulary,
        vocab=model.vocab_size,
        context=context,
        longest_prompt=int(info["max_req_input_len"]) - 1,
        kv_tokens=kv_tokens,
        end_tokens=_end_tokens(tokenizer, model),
        offer=Offer(
            arguments.speculative_algorithm,
            # SGLang's DFLASH samples with random numbers of its own.
            seeds=bool(arguments.enable_deterministic_inference) and arguments.speculative_algorithm != "DFLASH",
            grammars=has_grammars(arguments.grammar_backend, bool(arguments.reasoning_parser)),
        ),
        tooling=Tooling(manager, templates),
    )


def _end_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every id that ends an answer in SGLang."""
    found = {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return frozenset((found | set(model.hf_eos_token_id or ())) - {None})
