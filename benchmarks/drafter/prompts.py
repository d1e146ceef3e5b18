"""Prompts for training a drafter: free wordings expanded from a grammar, as chats of one or several user turns.

Deterministic by seed and Python version (code and doc strings come from the standard library's own source). Prompts
that repeat or nearly repeat an evaluation prompt are dropped. Nothing here knows tokens or models.

    python -m benchmarks.drafter.prompts --n 480000 --seed 1 --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.drafter.grammar import HERE, Terminals, expand, load_grammar, terminals, typo
from benchmarks.drafter.overlap import Overlap, words

EVAL_PROMPTS = HERE.parents[1] / "serve_app" / "models" / "eval_prompts.json"

OPENERS = [
    "Hi! ",
    "Hello, ",
    "Hey, ",
    "Please help. ",
    "Quick question: ",
    "Question: ",
    "I was wondering: ",
    "ok so ",
    "Good evening. ",
    "For a school project: ",
    "Sorry to bother you. ",
    "Be honest: ",
    "In your own words: ",
    "Imagine this. ",
    "Dear assistant, ",
    "Task: ",
    "I'm curious. ",
]
CLOSERS = [
    " Keep it short.",
    " Thanks!",
    " Thank you in advance.",
    " Be specific.",
    " Please answer in {length}.",
    " Use simple words.",
    " Give examples.",
    " No lists, please.",
    " Use bullet points.",
    " Think step by step.",
    " Explain your reasoning.",
    " Make it {style}.",
    " I'm a {job}.",
    " It's for {audience}.",
    " Be brief.",
    " Don't use jargon.",
    " Answer as a {job} would.",
    " Start with a short summary.",
    " I have only {@small} minutes.",
    " End with a question.",
    " Be creative.",
]


def dress(text: str, rng: random.Random, extra: Terminals) -> str:
    """Vary how a finished prompt is typed: openers, closers, articles, capitals, punctuation, slips."""
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIO])", r"\1n ", text)
    text = re.sub(r"(?<!\n)  +(?!\S*[=(:])", " ", text) if "```" not in text else text
    text = text[0].upper() + text[1:] if rng.random() < 0.85 else text
    if rng.random() < 0.08:
        text = rng.choice(OPENERS) + text
    if rng.random() < 0.14 and "```" not in text:
        text += ("" if text[-1] in ".?!" else ".") + expand(rng.choice(CLOSERS), rng, extra)
    casual = rng.random()
    if casual < 0.08 and "```" not in text:
        text = text.lower()
    if casual < 0.05:
        text = text.rstrip(".?!")
    if 0.08 < casual < 0.12 and "```" not in text:
        text = " ".join(typo(w, rng) if rng.random() < 0.08 else w for w in text.split(" "))
    return text.strip()


def chat(rng: random.Random, extra: Terminals) -> dict[str, object]:
    """One chat: {"kind", "system" or None, "turns": user texts in order, "primed": the target finishes the first
    user turn itself}."""
    rules, weights = load_grammar()
    if rng.random() < 0.10:
        return {
            "kind": "primed",
            "system": None,
            "turns": [expand(rng.choice(rules["primer"]), rng, extra)],
            "primed": True,
        }
    kind = rng.choices(list(weights), list(weights.values()))[0]
    turns = [dress(expand(rng.choice(rules[kind]), rng, extra), rng, extra)]
    if rng.random() < 0.22:
        turns += [
            dress(expand(rng.choice(rules["followup"]), rng, extra), rng, extra)
            for _ in range(rng.choice([1, 1, 1, 2, 3]))
        ]
    system = expand(rng.choice(rules["system"]), rng, extra) if rng.random() < 0.07 else None
    return {"kind": kind.removeprefix("kind."), "system": system, "turns": turns, "primed": False}


def held_out_texts(path: Path = EVAL_PROMPTS) -> list[str]:
    """Every user turn of the evaluation prompts."""
    return [m["content"] for item in json.loads(path.read_text()) for m in item["messages"] if m["role"] == "user"]


def generate(n: int, seed: int, held_out: list[str] | None = None) -> Iterator[dict[str, object]]:
    """`n` distinct chats, none of which shares a user turn (nearly) with `held_out` (default: the evaluation
    prompts)."""
    rng, extra = random.Random(seed), terminals()
    overlap = Overlap(held_out_texts() if held_out is None else held_out)
    seen: set[int] = set()
    while n > 0:
        item = chat(rng, extra)
        turns: list[str] = item["turns"]  # type: ignore[assignment]
        key = hash(tuple(" ".join(words(t)) for t in turns))
        if (key in seen and not item["primed"]) or any(overlap.hits(t) for t in turns):
            continue
        seen.add(key)
        n -= 1
        yield item


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    with args.out.open("w") as out:
        for item in generate(args.n, args.seed):
            out.write(json.dumps(item, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
