"""What a client already has of a job, so that another replica can go on where a lost one stopped.

What this module does not do: decide whether a job may go on (see `ingress.failover`), or generate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from serve_app.engines.base import GenerateRequest, Usage


class Progress(NamedTuple):
    """One choice, in an item: what is new in it; in a resumed job: all that was sent.

    Attributes:
        choice: its index in the answer. token_ids: emitted tokens, those whose text is still held back included.
        finished: its last chunk is among them. usage: of that chunk.
        offset: characters of the text so far and the bytes of a character that is not whole yet, where the answer
            states text offsets.
    """

    choice: int
    token_ids: tuple[int, ...]
    finished: bool = False
    usage: Usage | None = None
    offset: tuple[int, bytes] | None = None


class Work(NamedTuple):
    """A request to submit. `choice` is the only choice of its prompt that it generates, None for all of them."""

    prompt: int
    choice: int | None
    request: GenerateRequest


def merge(choices: int, parts: Iterable[Progress]) -> tuple[Progress | None, ...]:
    """All that was sent of each choice; None for a choice that has not begun."""
    tokens: dict[int, list[int]] = {}
    last: dict[int, Progress] = {}
    for part in parts:
        tokens.setdefault(part.choice, []).extend(part.token_ids)
        last[part.choice] = part
    return tuple(last[c]._replace(token_ids=tuple(tokens[c])) if c in last else None for c in range(choices))


def open_work(requests: Sequence[GenerateRequest], sent: Sequence[Progress | None]) -> list[Work]:
    """What is left to generate of a job's requests. A prompt of which nothing was sent is submitted as it was; else
    each choice that is not finished becomes a request of its own, which the engine continues."""
    work = []
    for prompt, request in enumerate(requests):
        n = request.sampling.n
        states = list(sent[prompt * n : (prompt + 1) * n])
        if not any(states):
            work.append(Work(prompt, None, request))
            continue
        for choice, state in enumerate(states):
            if state is None or not state.finished:
                work.append(Work(prompt, choice, _one_choice(request, choice, state.token_ids if state else ())))
    return work


def _one_choice(request: GenerateRequest, choice: int, emitted: tuple[int, ...]) -> GenerateRequest:
    sampling = request.sampling
    seed = None if sampling.seed is None else sampling.seed + choice
    return replace(
        request,
        request_id=f"{request.request_id}.{choice}",
        sampling=replace(sampling, n=1, seed=seed),
        emitted=emitted,
    )
