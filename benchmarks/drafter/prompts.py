"""Prompts for training a drafter: free wordings expanded from a grammar, as chats of one or several user turns.

Deterministic by seed (and by Python version: code and doc strings come from the standard library's own source). Prompts that
repeat or nearly repeat an evaluation prompt are dropped. Nothing here knows tokens or models.

    python -m benchmarks.drafter.prompts --n 400000 --seed 1 --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
EVAL_PROMPTS = HERE.parents[1] / "serve_app" / "models" / "eval_prompts.json"
Grammar = dict[str, list[str]]


@functools.cache
def load_grammar() -> tuple[Grammar, dict[str, float]]:
    """(rules, weight of each `kind.` rule). Weighted alternatives ("3*…") are repeated, so that one draw is one index."""
    rules: Grammar = {}
    weights: dict[str, float] = {}
    name, is_list = "", False
    for raw in (HERE / "grammar_words.txt").read_text().split("\n") + (HERE / "grammar_prompts.txt").read_text().split("\n"):
        header = re.fullmatch(r"\[([\w.]+)(;?)\](?: (\d+))?", raw)
        if header:
            name, is_list = header[1], bool(header[2])
            rules[name] = []
            if header[3]:
                weights[name] = float(header[3])
        elif raw.strip() and not raw.startswith("# ") and name:
            for item in raw.split(";") if is_list else _alternatives(rules[name], raw):
                times, text = re.fullmatch(r"(?s)(?:(\d)\*)?(.*)", item).groups()  # type: ignore[union-attr]
                rules[name] += [text.replace("\\n", "\n")] * int(times or 1)
    return rules, weights


def _alternatives(rule: list[str], line: str) -> list[str]:
    """One line is one alternative, except that a fenced block and the line after it continue the alternative above."""
    if rule and rule[-1].count("```") % 2 == 1 or line.startswith("```") or (rule and rule[-1].endswith("\n```") and rule[-1].startswith("Here is")):
        rule[-1] += "\n" + line
        return []
    return [line]


def expand(text: str, rng: random.Random, extra: dict[str, Callable[[random.Random], str]], depth: int = 0) -> str:
    """Replace every `{…}` of `text`: rules by one of their alternatives, `{a|b}` by one side, `{@name}` by `extra[name]`."""
    rules, _ = load_grammar()
    out, i = [], 0
    while i < len(text):
        if text[i] != "{":
            end = text.find("{", i)
            end = len(text) if end < 0 else end
            out.append(text[i:end])
            i = end
            continue
        level, j, cuts = 1, i + 1, [i]
        while level:
            level += (text[j] == "{") - (text[j] == "}")
            if level == 1 and text[j] == "|":
                cuts.append(j)
            j += 1
        cuts.append(j - 1)
        pick = rng.randrange(len(cuts) - 1)
        body = text[cuts[pick] + 1 : cuts[pick + 1]]
        if body.startswith("@"):
            out.append(extra[body[1:]](rng))
        elif body in rules:
            out.append(expand(rng.choice(rules[body]), rng, extra, depth + 1))
        else:
            out.append(expand(body, rng, extra, depth + 1))
        i = j
    return "".join(out)


@functools.cache
def library_text() -> tuple[list[str], list[str], list[str]]:
    """(functions of at most 18 lines, paragraphs of doc strings, single sentences), from the standard library's source."""
    code, docs = [], []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if any(part in {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"} for part in path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = source.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 2 <= (node.end_lineno or 0) - node.lineno < 18:
                block = lines[node.lineno - 1 : node.end_lineno]
                code.append("\n".join(line[node.col_offset :] for line in block))
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    flat = " ".join(paragraph.split())
                    if 60 < len(flat) < 700 and flat[0].isupper() and flat[-1] in ".!?" and ">>>" not in flat:
                        docs.append(flat)
    code = sorted({c for c in code if len(c) < 800})
    docs = sorted(set(docs))
    sentences = sorted({s for d in docs for s in re.split(r"(?<=[.!?]) (?=[A-Z])", d) if 40 < len(s) < 160})
    return code, docs, sentences


def _broken(rng: random.Random, extra: dict[str, Callable[[random.Random], str]]) -> str:
    """A sentence with the mistakes that people make."""
    text = expand(rng.choice(["{passage}", "{phrase} {phrase}", "{review}"]), rng, extra)
    words = text.split()[: rng.randint(6, 30)]
    swaps = {"is": "are", "are": "is", "was": "were", "were": "was", "has": "have", "have": "has", "their": "there", "its": "it's",
             "you": "u", "your": "you're", "a": "an", "an": "a", "to": "too", "than": "then", "goes": "go", "went": "goed"}
    return " ".join(swaps.get(w, typo(w, rng) if rng.random() < 0.12 else w) for w in words)


def typo(word: str, rng: random.Random) -> str:
    """One slip of the keyboard inside `word`; words under four letters stay."""
    if len(word) < 4 or not word.isalpha():
        return word
    i = rng.randrange(1, len(word) - 1)
    return rng.choice([word[:i] + word[i + 1] + word[i] + word[i + 2 :], word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:]])


def terminals() -> dict[str, Callable[[random.Random], str]]:
    """The `{@name}` terminals of the grammar."""
    code, docs, sentences = library_text()
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "the 3rd of May", "June 12", "tomorrow"]
    first = ["It was raining when {name} arrived in {place}.", "{name} had never liked {food}, until that evening.", "The {adj} {object} was gone.",
             "Nobody in {setting} had seen a {animal} before.", "On the night of the {event}, all the lights went out.", "\"Don't open it,\" said the {job}.",
             "Once upon a time, in {setting}, there lived a {adj} {animal}.", "The letter came on a {adj} morning.", "I should have listened to my {relation2}.",
             "There are two things you should know about {name}.", "The {job} looked at the {object} and sighed.", "Every year, the {animal}s came back to {place}."]
    extra: dict[str, Callable[[random.Random], str]] = {
        "code": lambda r: r.choice(code), "doc": lambda r: r.choice(docs), "sentence": lambda r: r.choice(sentences),
        "int": lambda r: str(r.choice([r.randint(10, 99), r.randint(100, 999), r.randint(2, 40) * 5])), "small": lambda r: str(r.randint(2, 9)),
        "two": lambda r: f"{r.randint(0, 24):02d}", "pct": lambda r: str(r.choice([5, 10, 12, 15, 18, 20, 25, 30, 35, 40, 45, 60, 75, 80])),
        "day": lambda r: r.choice(days), "cent": lambda r: f"{r.randint(11, 19)}th", "letter": lambda r: r.choice("ABCDEFGHIKLMNOPRSTVW"),
    }
    extra["broken"] = lambda r: _broken(r, extra)
    extra["firstline"] = lambda r: expand(r.choice(first), r, extra)
    return extra


OPENERS = ["Hi! ", "Hello, ", "Hey, ", "Please help. ", "Quick question: ", "Question: ", "I was wondering: ", "ok so ", "Good evening. ", "For a school project: ",
           "Sorry to bother you. ", "Be honest: ", "In your own words: ", "Imagine this. ", "Dear assistant, ", "Task: ", "I'm curious. "]
CLOSERS = [" Keep it short.", " Thanks!", " Thank you in advance.", " Be specific.", " Please answer in {length}.", " Use simple words.", " Give examples.", " No lists, please.",
           " Use bullet points.", " Think step by step.", " Explain your reasoning.", " Make it {style}.", " I'm a {job}.", " It's for {audience}.", " Be brief.",
           " Don't use jargon.", " Answer as a {job} would.", " Start with a short summary.", " I have only {@small} minutes.", " End with a question.", " Be creative."]


def dress(text: str, rng: random.Random, extra: dict[str, Callable[[random.Random], str]]) -> str:
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


def chat(rng: random.Random, extra: dict[str, Callable[[random.Random], str]]) -> dict[str, object]:
    """One chat: {"kind", "system" or None, "turns": user texts in order, "primed": the target finishes the first user turn itself}."""
    rules, weights = load_grammar()
    if rng.random() < 0.10:
        return {"kind": "primed", "system": None, "turns": [expand(rng.choice(rules["primer"]), rng, extra)], "primed": True}
    kind = rng.choices(list(weights), list(weights.values()))[0]
    turns = [dress(expand(rng.choice(rules[kind]), rng, extra), rng, extra)]
    if rng.random() < 0.22:
        turns += [dress(expand(rng.choice(rules["followup"]), rng, extra), rng, extra) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    system = expand(rng.choice(rules["system"]), rng, extra) if rng.random() < 0.07 else None
    return {"kind": kind.removeprefix("kind."), "system": system, "turns": turns, "primed": False}


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation: what overlap is measured on."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Overlap:
    """Finds texts that equal or nearly equal one of the held-out prompts.

    Near: half of the held-out text's word trigrams appear, or any run of eight words does, or the same set of words in any order.
    """

    def __init__(self, held_out: list[str]) -> None:
        self.grams: list[tuple[frozenset[str], set[tuple[str, ...]], set[tuple[str, ...]]]] = []
        self.index: dict[tuple[str, ...], set[int]] = {}
        self.bags: set[frozenset[str]] = set()
        for i, text in enumerate(held_out):
            w = words(text)
            three = set(zip(w, w[1:], w[2:], strict=False))
            self.grams.append((frozenset(w), three, {tuple(w[j : j + 8]) for j in range(len(w) - 7)}))
            self.bags.add(frozenset(w))
            for gram in three:
                self.index.setdefault(gram, set()).add(i)

    def hits(self, text: str) -> bool:
        """Whether `text` repeats or nearly repeats a held-out prompt."""
        w = words(text)
        if frozenset(w) in self.bags:
            return True
        three = set(zip(w, w[1:], w[2:], strict=False))
        candidates = {i for gram in three for i in self.index.get(gram, ())}
        if not candidates:
            return False
        eight = {tuple(w[j : j + 8]) for j in range(len(w) - 7)}
        return any(len(self.grams[i][1] & three) * 2 >= len(self.grams[i][1]) or self.grams[i][2] & eight for i in candidates)


def held_out_texts(path: Path = EVAL_PROMPTS) -> list[str]:
    """Every user turn of the evaluation prompts."""
    return [m["content"] for item in json.loads(path.read_text()) for m in item["messages"] if m["role"] == "user"]


def generate(n: int, seed: int, held_out: list[str] | None = None) -> Iterator[dict[str, object]]:
    """`n` distinct chats, none of which shares a user turn (nearly) with `held_out` (default: the evaluation prompts)."""
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
