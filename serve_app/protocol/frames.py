"""Engine chunks → OpenAI's wire: SSE frames for a stream, one body otherwise.

Every frame is a whole event of valid UTF-8; the envelope (id, object, created, model) is rendered once per job, as
it is the same in all frames.

What this module does not do: send, wait or batch; the replica decides which chunks go together.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve_app.engines.base import Chunk, TokenLogprob, Usage
from serve_app.errors import ServeError
from serve_app.protocol.jobs import Job
from serve_app.protocol.resume import Progress

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; the value other servers send for a token of probability zero.
MIN_LOGPROB = -9999.0


def error_frames(error: ServeError) -> bytes:
    """How a stream that has begun ends in failure: the client raises on the first frame."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE


@dataclass
class _Choice:
    """State of one choice while its chunks come in."""

    started: bool = False
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    delta: dict[str, str] = field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Usage | None = None
    tokens: int = 0
    characters: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def offset_of(self, raw: bytes) -> int:
        """Where the text of one more token begins, in characters of the answer."""
        pending = bytes(self.decoder.getstate()[0])
        broken = bool(pending and raw) and not _continues(pending, raw[0])
        # A character that breaks off became U+FFFD, which is not this token's text.
        offset = self.characters + broken
        self.characters += len(self.decoder.decode(raw))
        return offset

    def restore(self, sent: Progress) -> None:
        """As if this object had rendered what another replica sent."""
        self.started, self.tokens, self.usage = True, len(sent.token_ids), sent.usage
        if sent.offset is not None:
            self.characters = sent.offset[0]
            self.decoder.setstate((sent.offset[1], 0))

    def add_calls(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Keep a delta's calls: the first entry of each names it, all of them add to its arguments."""
        for entry in entries:
            function = entry["function"]
            if entry["index"] not in self.calls:
                called = {"name": function["name"], "arguments": ""}
                self.calls[entry["index"]] = {"id": entry["id"], "type": entry["type"], "function": called}
            self.calls[entry["index"]]["function"]["arguments"] += function.get("arguments", "")

    def take(self, chunk: Chunk) -> None:
        self.tokens += len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage


class Renderer:
    """Renders the chunks of one job, in the order they came."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._n = job.requests[0].sampling.n
        self._choices = [_Choice() for _ in range(job.choices)]
        for sent in job.sent:
            if sent is not None:
                self._choices[sent.choice].restore(sent)
        self._states_offsets = not job.chat and job.requests[0].sampling.logprobs is not None
        kind = "text_completion" if not job.chat else "chat.completion.chunk" if job.stream else "chat.completion"
        self._head = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._open = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        # With usage asked for, every other frame carries it as null.
        self._close = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"

    def frame(self, prompt: int, chunk: Chunk) -> bytes:
        """The frame of one chunk; empty when the chunk has nothing to show yet (text held back)."""
        index = prompt * self._n + chunk.index
        choice = self._choices[index]
        choice.take(chunk)
        first, choice.started = not choice.started, True
        if not (first or chunk.text or chunk.delta or chunk.logprobs or chunk.finish_reason):
            return b""
        entry: dict[str, Any] = {"index": index}
        if self._job.chat:
            entry["delta"] = _delta(chunk, first)
            entry["logprobs"] = _chat_logprobs(chunk.logprobs)
        else:
            entry["text"] = chunk.text
            entry["logprobs"] = _legacy_logprobs(choice, chunk.logprobs)
        entry["finish_reason"] = chunk.finish_reason
        return self._open + orjson.dumps(entry) + self._close

    def progress(self, prompt: int, chunk: Chunk) -> Progress:
        """What another replica must know of a chunk that `frame` has just rendered."""
        index = prompt * self._n + chunk.index
        choice, offset = self._choices[index], None
        if self._states_offsets:
            offset = choice.characters, bytes(choice.decoder.getstate()[0])
        return Progress(index, chunk.token_ids, chunk.finish_reason is not None, chunk.usage, offset)

    def end(self) -> bytes:
        """The usage frame if asked for, and `[DONE]`."""
        if not self._job.include_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": self._usage()}) + b"\n\n" + DONE

    def collect(self, prompt: int, chunk: Chunk) -> None:
        """Keep a chunk for `body`."""
        choice = self._choices[prompt * self._n + chunk.index]
        choice.take(chunk)
        choice.text.append(chunk.text)
        choice.logprobs.extend(chunk.logprobs or ())
        for key, value in (chunk.delta or {}).items():
            if key == "tool_calls":
                choice.add_calls(value)
            else:
                choice.delta[key] = choice.delta.get(key, "") + value

    def body(self) -> bytes:
        """The whole answer of a job that does not stream."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return orjson.dumps({**self._head, "choices": choices, "usage": self._usage()})

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, asked = "".join(choice.text), self._job.requests[0].sampling.logprobs is not None
        logprobs = tuple(choice.logprobs) if asked else None
        entry: dict[str, Any] = {"index": index}
        if self._job.chat:
            calls = {"tool_calls": list(choice.calls.values())} if choice.calls else {}
            content = None if calls and not text else text
            entry["message"] = {"role": "assistant", "content": content, "refusal": None, **choice.delta, **calls}
            entry["logprobs"] = _chat_logprobs(logprobs)
        else:
            entry["text"] = text
            entry["logprobs"] = _legacy_logprobs(choice, logprobs)
        entry["finish_reason"] = choice.finish_reason
        return entry

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = cached = completion = 0
        reasoning: list[int] = []
        for start in range(0, len(self._choices), self._n):
            group = self._choices[start : start + self._n]
            usages = [c.usage for c in group if c.usage is not None]
            # The choices of a prompt share it: it counts once.
            prompt_tokens += max((u.prompt_tokens for u in usages), default=0)
            cached += max((u.cached_tokens for u in usages), default=0)
            completion += sum(c.usage.completion_tokens if c.usage else c.tokens for c in group)
            reasoning += [u.reasoning_tokens for u in usages if u.reasoning_tokens is not None]
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if len(reasoning) == len(self._choices):  # else nobody knows them all
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage


def _delta(chunk: Chunk, first: bool) -> dict[str, Any]:
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if chunk.text or (first and not chunk.delta):
        delta["content"] = chunk.text
    delta.update(chunk.delta or {})
    return delta


def _continues(pending: bytes, byte: int) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(pending + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None

    def entry(one: TokenLogprob) -> dict[str, Any]:
        return {"token": one.token, "logprob": _finite(one.logprob), "bytes": list(one.bytes)}

    content = [{**entry(one), "top_logprobs": [entry(other) for other in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}


def _legacy_logprobs(choice: _Choice, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """OpenAI's older shape. Offsets count characters of the answer; a token that ends inside a character shares the
    offset of the next."""
    if logprobs is None:
        return None
    offsets = [choice.offset_of(bytes(one.bytes)) for one in logprobs]
    return {
        "tokens": [one.token for one in logprobs],
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        # The chosen token is always among them.
        "top_logprobs": [{o.token: _finite(o.logprob) for o in (*one.top, one)} for one in logprobs],
        "text_offset": offsets,
    }
