"""What may be asked of SGLang with the running algorithm, and the same in its words.

What this module does not do: check lengths and ids (`engines.local.limits` does), or send anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.errors import Unsupported

_TOP_K_OFF = -1
_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(frozen=True)
class Offer:
    """What the running SGLang can do.

    Attributes:
        algorithm: DDTREE, DFLASH, or None. seeds: it samples as a function of seed and position
            (`enable_deterministic_inference`). grammars: it holds answers to a format.
    """

    algorithm: str | None
    seeds: bool
    grammars: bool


def refuse(request: GenerateRequest, offer: Offer) -> None:
    """Raises Unsupported, naming the field, for what would be ignored, refused later, or done differently."""
    params = request.sampling
    if params.repetition_penalty != 1:
        # SGLang's counts the answer alone; what the field means counts the prompt too.
        raise Unsupported("repetition_penalty is not offered by this engine", param="repetition_penalty")
    penalties = [name for name, neutral in _PENALTIES.items() if getattr(params, name) != neutral]
    if offer.algorithm is not None:
        # They would need one state per path of the tree; SGLang's DFLASH takes them and leaves them out.
        drafts = "draft trees" if offer.algorithm == "DDTREE" else "speculation.method chain"
        for name in penalties:
            raise Unsupported(f"{name} is not offered with {drafts}", param=name)
        if params.min_tokens:
            raise Unsupported(f"min_tokens is not offered with {drafts}", param="min_tokens")
    if offer.algorithm == "DFLASH":
        _refuse_for_chain(params)
    if params.seed is not None and params.temperature > 0 and not offer.seeds:
        raise Unsupported(
            "seed needs sglang.server_args.enable_deterministic_inference, which is off here", param="seed"
        )
    if params.logprobs is not None and (penalties or params.logit_bias):
        # SGLang reports them after bias and penalties.
        raise Unsupported("logprobs cannot be combined with logit_bias or penalties", param="logprobs")
    if params.json_schema is not None and not offer.grammars:
        raise Unsupported(
            "this engine has no grammar backend, or one that does not go with its reasoning parser",
            param="response_format",
        )
    if request.emitted and (penalties or params.json_schema is not None):
        # Neither knows what another engine emitted.
        raise Unsupported("an answer with penalties or a grammar cannot be continued", param="emitted")


def _refuse_for_chain(params: SamplingParams) -> None:
    """What SGLang's DFLASH refuses, or takes and leaves out: it samples with random numbers of its own."""
    if params.logprobs is not None:
        raise Unsupported("logprobs are not offered with speculation.method chain", param="logprobs")
    if params.temperature > 0 and params.min_p > 0:
        raise Unsupported("min_p is not offered with speculation.method chain", param="min_p")
    if params.temperature > 0 and params.seed is not None:
        raise Unsupported("seed is not offered with speculation.method chain", param="seed")


def sampling_params(params: SamplingParams, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters of one choice.

    Args:
        max_new_tokens: bounded by the context, without tokens emitted elsewhere. seed: the choice's own.
    """
    asked: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or _TOP_K_OFF,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "min_new_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        **{name: getattr(params, name) for name in _PENALTIES},
    }
    if params.stop and not params.min_tokens:
        # The text ends by our own reading anyway; SGLang's saves it the steps after.
        asked["stop"] = list(params.stop)
    if params.json_schema is not None:
        asked["json_schema"] = params.json_schema
    if params.logit_bias:
        asked["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    if seed is not None:
        asked["sampling_seed"] = seed
    return asked


def generation(
    rid: str, prompt: list[int], sampling: dict[str, Any], logprobs: int | None, reasons: bool = False
) -> dict[str, Any]:
    """Keyword arguments of SGLang's GenerateReqInput, for a stream of token ids.

    Args:
        reasons: a grammar begins behind the reasoning with which the answer begins.
    """
    asked: dict[str, Any] = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "stream": True}
    if reasons:
        asked["require_reasoning"] = True
    if logprobs is not None:
        # -1: of the answer's tokens alone.
        asked |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": logprobs}
    return asked
