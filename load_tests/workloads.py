"""What is asked: conversations of several kinds, drawn from a seed, so that two runs ask the same.

Lengths are lognormal, as those of public chat traces are: many short, a long tail. The questions are the model
evaluation's own held-out chat prompts, since the acceptance length depends on what is asked.

What this module does not do: send anything.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_tests.texts import PASSAGES, SYSTEM

PROMPTS = Path(__file__).resolve().parent.parent / "serve_app" / "models" / "eval_prompts.json"
PRIORITY_HEADER = "x-priority"
FIXED_TOKENS = 64


@dataclass(frozen=True)
class Ask:
    """A conversation: a first request, and what the user says after each answer.

    Attributes:
        abandon_after: leave after so many events with a choice; None reads to the end.
        think_s: pause before each follow-up.
    """

    workload: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int
    follow_ups: tuple[str, ...] = ()
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = False
    min_tokens: int = 0
    abandon_after: int | None = None
    think_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, model: str, messages: list[dict[str, str]] | None = None) -> dict[str, Any]:
        """The request as OpenAI's wire has it."""
        body: dict[str, Any] = {
            "model": model, "messages": messages or list(self.messages),
            "max_tokens": self.max_tokens, "temperature": self.temperature,
        }  # fmt: skip
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.min_tokens:
            body["min_tokens"] = self.min_tokens
        return body


def questions(code: bool) -> list[str]:
    """The evaluation's single questions, about code or about anything else."""
    entries = json.loads(PROMPTS.read_text())
    single = [entry for entry in entries if [m["role"] for m in entry["messages"]] == ["user"]]
    return [str(e["messages"][0]["content"]) for e in single if (e["kind"] == "code") == code]


class Source:
    """Draws asks. `scale` shrinks all lengths, for machines that compute a few hundred tokens a second."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.rng, self.scale = random.Random(seed), scale
        self._questions = {code: questions(code) for code in (False, True)}

    def length(self, median: float, sigma: float, low: int, high: int) -> int:
        drawn = self.rng.lognormvariate(math.log(median * self.scale), sigma)
        return max(1, round(min(max(drawn, low * self.scale), high * self.scale)))

    def question(self, code: bool = False) -> str:
        return self.rng.choice(self._questions[code])

    def passage(self, words: int, rng: random.Random | None = None) -> str:
        """So many words of connected text, drawn from `rng` in place of the source's own."""
        out: list[str] = []
        while len(out) < words:
            out += (rng or self.rng).choice(PASSAGES).split()
        return " ".join(out[:words])


def _user(text: str, system: str | None = None) -> tuple[dict[str, str], ...]:
    user = {"role": "user", "content": text}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


def chat(source: Source) -> Ask:
    """One question, sometimes with text to work on."""
    words = source.length(40, 1.1, 0, 600)
    text = source.question()
    if words > 60 * source.scale:
        text = f"{text}\n\n{source.passage(words)}"
    return Ask("chat", _user(text), source.length(140, 0.8, 16, 800))


def multi_turn(source: Source) -> Ask:
    """A conversation whose context grows by every answer."""
    more = tuple(source.question() for _ in range(source.rng.randint(2, 4)))
    return Ask("multi_turn", _user(source.question()), source.length(100, 0.6, 16, 400), more, think_s=0.2)


def shared_prefix(source: Source) -> Ask:
    """The same long system prompt before every question."""
    return Ask("shared_prefix", _user(source.question(), SYSTEM), source.length(80, 0.6, 16, 300))


def long_context(source: Source) -> Ask:
    """Much to read, little to write."""
    words = source.length(1800, 0.4, 800, 4000)
    text = f"Summarise in two sentences.\n\n{source.passage(words)}"
    return Ask("long_context", _user(text), source.length(60, 0.3, 16, 120))


def code(source: Source) -> Ask:
    return Ask("code", _user(source.question(code=True)), source.length(220, 0.5, 32, 800))


def abandon(source: Source) -> Ask:
    """The reader leaves long before the end, which nothing may bring nearer, or the books could not be checked."""
    after = source.rng.randint(1, 6)
    return Ask("abandon", _user(source.question()), 2000, abandon_after=after, ignore_eos=True)


def whole(source: Source) -> Ask:
    """Not streamed."""
    return Ask("whole", _user(source.question()), source.length(100, 0.6, 16, 400), stream=False)


def priority(source: Source) -> Ask:
    """Interactive and batch work side by side; reported apart."""
    batch = source.rng.random() < 0.5
    name = "batch" if batch else "interactive"
    limit = source.length(300, 0.4, 64, 800) if batch else source.length(60, 0.5, 16, 200)
    return Ask(f"priority_{name}", _user(source.question()), limit, headers={PRIORITY_HEADER: name})


def fixed(source: Source) -> Ask:
    """Exactly so many tokens for everybody, for comparison between tools."""
    tokens = max(2, round(FIXED_TOKENS * source.scale))
    return Ask("fixed", _user(source.question()), tokens, ignore_eos=True, min_tokens=tokens)


WORKLOADS: dict[str, Callable[[Source], Ask]] = {
    "chat": chat, "multi_turn": multi_turn, "shared_prefix": shared_prefix, "long_context": long_context,
    "code": code, "abandon": abandon, "whole": whole, "priority": priority, "fixed": fixed,
}  # fmt: skip
DEFAULT_MIX = "chat=5,multi_turn=1,shared_prefix=1,code=1,whole=1,abandon=1"


def parse_mix(text: str) -> dict[str, float]:
    """`chat=5,code=1` → weights. Raises ValueError naming the unknown workload."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in WORKLOADS:
            raise ValueError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")
        mix[name] = float(weight or 1)
        if not mix[name] > 0:
            raise ValueError(f"the weight of {name} must be positive")
    return mix


def draw(mix: Mapping[str, float], seed: int, scale: float = 1.0) -> Iterator[Ask]:
    """Asks without end; the same for the same arguments."""
    source = Source(seed, scale)
    names, weights = list(mix), list(mix.values())
    while True:
        yield WORKLOADS[source.rng.choices(names, weights)[0]](source)
