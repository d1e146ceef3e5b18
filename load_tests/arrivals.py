"""When the requests of an open loop are sent, and what they ask.

What this module does not do: send.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from load_tests.recorder import Load
from load_tests.shapes import Shape, poisson, read_trace, trace_text
from load_tests.workloads import Ask, Source


def arrivals_of(shape: Shape, load: Load, options: Any) -> Iterator[tuple[float, Ask]]:
    """(seconds since the start, ask). Raises ValueError for a trace that is missing or cannot be read."""
    if shape.kind == "trace":
        if options.trace is None or not options.trace.is_file():
            raise ValueError("the shape trace needs --trace with a file")
        return _replay(shape, load, options)
    return _poisson(shape, load, options.seed)


def _poisson(shape: Shape, load: Load, seed: int) -> Iterator[tuple[float, Ask]]:
    for at in poisson(shape.rate, shape.duration_s, seed):
        ask = load.next_ask()
        if ask is None:
            return
        # Nobody waits for an answer here: a conversation is its first request.
        yield at, replace(ask, follow_ups=())


def _replay(shape: Shape, load: Load, options: Any) -> Iterator[tuple[float, Ask]]:
    source = Source(options.seed, options.scale)
    for row in read_trace(options.trace, options.speed):
        if row.at_s >= shape.duration_s or load.next_ask() is None:
            return
        text = trace_text(row, options.scale, lambda rng, words: source.passage(words, rng))
        tokens = max(1, round(row.output_tokens * options.scale))
        message = {"role": "user", "content": text}
        yield row.at_s, Ask("trace", (message,), tokens, ignore_eos=True, min_tokens=tokens)
