"""One choice of one request: SGLang's outputs in, chunks out.

Text, stops and the end are decided from the token ids alone, token by token, by the embedded engine's own rules. So an
answer reads the same whichever engine gave it, and nothing behind a stop leaks, whatever a step accepted.

What this module does not do: talk to SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from serve_app.engines.base import Chunk, FinishReason, SamplingParams, TokenLogprob, Usage
from serve_app.engines.local.logprobs import token_entry
from serve_app.engines.local.stopping import Ending, TextStream
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.engines.sglang.parsed import ParsedStream
from serve_app.errors import EngineFailed, InvalidRequest, NotReady, Overloaded, ServeError

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_MESSAGE_CHARS = 300


class Choice:
    """State of one choice.

    Args:
        index: which of the request's choices. rid: SGLang's id of it. prompt: tokens of its prompt. text: its text, fed
            here. vocabulary: of its log-probabilities' texts. logprobs: alternatives per token, None for none. param: the
            field to name where SGLang's scheduler refuses the request, None where it may be any.

    Attributes:
        rid, param: as given. over: its last chunk was made; what SGLang still sends is of no interest.
    """

    def __init__(
        self,
        index: int,
        rid: str,
        prompt: int,
        text: TextStream | ParsedStream,
        vocabulary: Vocabulary,
        logprobs: int | None,
        param: str | None = None,
    ) -> None:
        self.rid, self.param = rid, param
        self.over = False
        self._index, self._prompt, self._text = index, prompt, text
        self._vocabulary, self._logprobs = vocabulary, logprobs
        self._cached = 0

    def feed(self, output: Mapping[str, Any]) -> Chunk | None:
        """The chunk of one output: token ids since the last one, and why it ended if it did. None where it has nothing.

        Raises:
            ServeError: SGLang gave the request up for a reason of its own.
        """
        meta = output["meta_info"]
        finish = meta["finish_reason"]
        if finish is not None and finish["type"] == "abort":
            # Its tokens are the last ones once more.
            return self._given_up(finish)
        self._cached = meta.get("cached_tokens") or 0
        tokens = output["output_ids"]
        used, text, ending = self._text.push(tokens)
        if ending is None and finish is not None:
            text += self._text.finish()
            # The end of a grammar names the last token as its stop; it is part of the answer.
            ending = Ending(_REASONS.get(finish["type"], "stop"))
            if isinstance(self._text, ParsedStream):
                ending = self._text.ended(ending)
        if not used and ending is None:
            return None
        self.over = ending is not None
        return Chunk(
            self._index,
            tuple(tokens[:used]),
            text,
            None if self._logprobs is None else self._entries(meta, tokens, used),
            ending.reason if ending else None,
            ending.detail if ending else None,
            self._usage() if ending else None,
            self._text.delta() if isinstance(self._text, ParsedStream) else None,
        )

    def aborted(self) -> Chunk:
        """Its last chunk where somebody ended it."""
        self.over = True
        empty = None if self._logprobs is None else ()
        return Chunk(self._index, (), self._text.finish(), empty, "abort", usage=self._usage())

    def _given_up(self, finish: Mapping[str, Any]) -> Chunk:
        status = finish.get("status_code")
        if status is None and self.param is None:
            return self.aborted()
        self.over = True
        if status is None:
            # Nobody asked for it: the grammar stopped, as it would on every replica (one that grew beyond a row, say).
            raise InvalidRequest("The answer could not be held to this format; a simpler one may do.", param=self.param)
        raise refusal(int(status), str(finish.get("message") or ""), self.param)

    def _usage(self) -> Usage:
        reasoning = self._text.reasoning_tokens if isinstance(self._text, ParsedStream) else None
        return Usage(self._prompt, self._text.count, min(self._cached, self._prompt), reasoning)

    def _entries(self, meta: Mapping[str, Any], tokens: Sequence[int], used: int) -> tuple[TokenLogprob, ...]:
        rows = meta.get("output_token_logprobs") or []
        if [token for _, token, *_ in rows] != list(tokens):
            raise EngineFailed("SGLang's log-probabilities are not those of its tokens")
        tops = meta.get("output_top_logprobs") or [None] * len(rows)
        return tuple(
            self._entry(token, value, tuple(self._entry(other, score) for score, other, *_ in top or ()))
            for (value, token, *_), top in zip(rows[:used], tops[:used], strict=True)
        )

    def _entry(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return token_entry(self._vocabulary, token, float(logprob), top)


def refused_field(params: SamplingParams, tools: bool = False) -> str | None:
    """What SGLang refuses when it refuses a request that passed our own checks: a grammar, where there is one. `tools`:
    it is theirs."""
    return "tools" if tools else None if params.json_schema is None else "response_format"


def refusal(status: int, message: str, param: str | None) -> ServeError:
    """The error of a request that SGLang's scheduler did not take or could not finish."""
    if status == HTTPStatus.BAD_REQUEST:
        return InvalidRequest(f"SGLang refused the request: {message[:_MESSAGE_CHARS]}", param=param)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Overloaded("the engine's queue is full", retry_after=1)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return EngineFailed("SGLang failed while it worked on this request")
    return NotReady("SGLang gave the request up")
