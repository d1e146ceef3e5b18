"""State of one choice of one request, from the queue to its last token.

What this module does not do: compute; it only keeps the books that the step loop reads and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from serve_app.engines.base import Chunk, SamplingParams, Trail
from serve_app.engines.local.penalties import LogitRules
from serve_app.engines.local.stopping import TextStream
from serve_app.errors import ServeError

# Receives what one step produced for a choice, or the error that ended it.
Sink = Callable[[Chunk | ServeError], None]


@dataclass
class Ledger:
    """What `Trail` will say, while it happens."""

    queued_ns: int = field(default_factory=time.time_ns)
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    steps: int = 0
    accepted: int = 0
    nodes: int = 0
    eager_forwards: int = 0

    def verified(self, accepted: int, nodes: int) -> None:
        self.steps += 1
        self.accepted += accepted
        self.nodes += nodes

    def close(self) -> Trail:
        return Trail(finished_ns=time.time_ns(), **vars(self))


@dataclass(eq=False)
class Sequence:
    """One choice.

    Attributes:
        index: which of the request's choices.
        prompt: token ids. given: what prefill computes, the prompt and tokens that another engine emitted (they begin
            `output`). seed: of this choice. max_tokens: output tokens at most, bounded by the context.
        probe: a health check; it has a slot of its own and passes the queue.
        slot: KV slot while running, else None.
        committed: tokens whose KV is in the slot. The last emitted token (the root) is never among them.
        output: emitted tokens.
        pending: features [b, F] of tokens committed by the last step and not yet in the drafter's context; the
            first `pending_len` rows count, and they belong to the positions just below `committed`.
        ledger: what its trace will tell.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    text: TextStream
    sink: Sink
    max_tokens: int
    probe: bool = False
    rules: LogitRules | None = None
    slot: int | None = None
    committed: int = 0
    output: list[int] = field(default_factory=list)
    pending: Tensor | None = None
    pending_len: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    given: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.given = self.prompt

    def resume(self, emitted: Seq[int]) -> None:
        """Go on behind tokens that another engine emitted. Raises InvalidRequest where they end the text."""
        self.text.resume(emitted)
        self.output.extend(emitted)
        self.given = self.prompt + self.output
        if self.rules is not None:
            self.rules.commit(emitted)

    @property
    def prefilled(self) -> bool:
        return self.committed >= len(self.given)

    @property
    def root(self) -> int:
        """The last emitted token, which the next step computes first."""
        return self.output[-1]

    @property
    def greedy(self) -> bool:
        """Whether an argmax of the raw logits is the whole of sampling for the next token and any after it."""
        return self.params.temperature == 0 and not (self.rules and self.rules.active(len(self.output)))
