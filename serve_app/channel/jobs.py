"""A job as plain data, for a stream that is opened over the channel.

Every dataclass is an array of its fields in their order, so that a new field needs nothing here unless its type does.

What this module does not do: check values; they were validated before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgpack

from serve_app.channel.wire import ChannelError, usage_of
from serve_app.engines.base import GenerateRequest, SamplingParams, Usage
from serve_app.protocol import Job, Origin, Progress


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


_JOB, _REQUEST, _SAMPLING = _names(Job), _names(GenerateRequest), _names(SamplingParams)
_job, _request, _sampling = attrgetter(*_JOB), attrgetter(*_REQUEST), attrgetter(*_SAMPLING)
_origin = attrgetter(*_names(Origin))
_BIAS, _PARAMS = _SAMPLING.index("logit_bias"), _REQUEST.index("sampling")
_REQUESTS, _ORIGIN, _SENT, _SHUNNED = (_JOB.index(name) for name in ("requests", "origin", "sent", "shunned"))


def pack_job(job: Job) -> bytes:
    """Raises ValueError, TypeError or OverflowError for what msgpack does not have: half a surrogate pair, a number of
    more than 64 bits."""
    values = list(_job(job))
    values[_REQUESTS] = [_plain(request) for request in job.requests]
    values[_ORIGIN] = _origin(job.origin)
    values[_SENT] = [sent and (*sent[:3], sent.usage and _usage(sent.usage), sent.offset) for sent in job.sent]
    values[_SHUNNED] = sorted(job.shunned)
    # An engine's numbers may be some library's.
    packed: bytes = msgpack.packb(values, default=int)
    return packed


_usage = attrgetter(*_names(Usage))


def _plain(request: GenerateRequest) -> list[Any]:
    sampling = list(_sampling(request.sampling))
    # Keys of msgpack's maps are strings here.
    sampling[_BIAS] = list(request.sampling.logit_bias.items())
    values = list(_request(request))
    values[_PARAMS] = sampling
    return values


def job_of(packed: bytes) -> Job:
    """What `pack_job` packed. Raises ChannelError."""
    try:
        values = msgpack.unpackb(packed)
        values[_REQUESTS] = [_request_of(request) for request in values[_REQUESTS]]
        values[_ORIGIN] = Origin(*values[_ORIGIN])
        values[_SENT] = [sent and _progress_of(*sent) for sent in values[_SENT]]
        values[_SHUNNED] = frozenset(values[_SHUNNED])
        return Job(*_tuples(values))
    except Exception as error:  # whatever wrong data make them raise
        raise ChannelError(f"not a job: {type(error).__name__}") from None


def _request_of(values: list[Any]) -> GenerateRequest:
    sampling = values[_PARAMS]
    sampling[_BIAS] = dict(sampling[_BIAS])
    values[_PARAMS] = SamplingParams(*_tuples(sampling))
    return GenerateRequest(*_tuples(values))


def _progress_of(choice: int, ids: Sequence[int], finished: bool, usage: Any, offset: Any) -> Progress:
    return Progress(choice, tuple(ids), finished, usage and usage_of(usage), offset and (offset[0], offset[1]))


def _tuples(values: Sequence[Any]) -> list[Any]:
    """A dataclass's sequences are tuples."""
    return [tuple(value) if isinstance(value, list) else value for value in values]
