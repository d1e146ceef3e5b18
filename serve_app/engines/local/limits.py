"""What a request may ask of this engine and model; refusals name the field and the numbers.

What this module does not do: check types and ranges that hold for any model (the wire models do).
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.config import EngineConfig
from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.errors import ContextLengthExceeded, InvalidRequest


def bounded_tokens(request: GenerateRequest, prompt: int, context: int) -> int:
    """Output tokens at most, for a prompt of `prompt` tokens.

    Raises:
        ContextLengthExceeded: no room for one token, or not for `max_tokens`, which it names as the request does.
    """
    field = "messages" if request.messages is not None else "prompt"
    if prompt >= context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens; this model's context holds {context}, answer included", param=field
        )
    wanted, name = request.sampling.max_tokens, request.sampling.max_tokens_name
    if wanted is None:
        return context - prompt
    if prompt + wanted > context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and {name} is {wanted}: {prompt + wanted} in all; "
            f"this model's context holds {context}",
            param=name,
        )
    return wanted


def check_sampling(params: SamplingParams, vocab: int) -> None:
    """Raises InvalidRequest for token ids this model lacks, or limits that contradict each other."""
    if any(not 0 <= token < vocab for token in params.logit_bias):
        raise InvalidRequest(f"logit_bias keys must be token ids from 0 to {vocab - 1}", param="logit_bias")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
    if params.logprobs is not None and not 0 <= params.logprobs <= min(20, vocab):
        raise InvalidRequest("logprobs must be from 0 to 20", param="logprobs")


def check_choices(choices: int, engine: EngineConfig) -> None:
    """Raises InvalidRequest for more than would fit into an idle engine, where waiting would not help."""
    most = engine.max_queued + engine.max_running
    if choices > most:
        raise InvalidRequest(f"n may be at most {most}, the slots and the queue together", param="n")


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """Raises InvalidRequest for token ids to be made into text that this model lacks."""
    if any(not 0 <= token < vocab for token in tokens):
        raise InvalidRequest(f"token ids must be from 0 to {vocab - 1}", param="tokens")
