"""The prompt grammar: reading its two files, expanding a rule, and the terminals that come from code or chance.

Not here: which rules make a chat, and how a finished prompt is typed (`prompts.py`).
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
Grammar = dict[str, list[str]]
Terminals = dict[str, Callable[[random.Random], str]]


@functools.cache
def load_grammar() -> tuple[Grammar, dict[str, float]]:
    """(rules, weight of each `kind.` rule). Weighted alternatives ("3*…") are repeated, so that one draw is one
    index."""
    rules: Grammar = {}
    weights: dict[str, float] = {}
    name, is_list = "", False
    for raw in (HERE / "grammar_words.txt").read_text().split("\n") + (HERE / "grammar_prompts.txt").read_text().split(
        "\n"
    ):
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
    if (
        (rule and rule[-1].count("```") % 2 == 1)
        or line.startswith("```")
        or (rule and rule[-1].endswith("\n```") and rule[-1].startswith("Here is"))
    ):
        rule[-1] += "\n" + line
        return []
    return [line]


def expand(text: str, rng: random.Random, extra: Terminals, depth: int = 0) -> str:
    """Replace every `{…}` of `text`: rules by one of their alternatives, `{a|b}` by one side, `{@name}` by
    `extra[name]`."""
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
    """(functions of at most 18 lines, paragraphs of doc strings, single sentences), from the standard library's
    source."""
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


def _broken(rng: random.Random, extra: Terminals) -> str:
    """A sentence with the mistakes that people make."""
    text = expand(rng.choice(["{passage}", "{phrase} {phrase}", "{review}"]), rng, extra)
    words = text.split()[: rng.randint(6, 30)]
    swaps = {
        "is": "are",
        "are": "is",
        "was": "were",
        "were": "was",
        "has": "have",
        "have": "has",
        "their": "there",
        "its": "it's",
        "you": "u",
        "your": "you're",
        "a": "an",
        "an": "a",
        "to": "too",
        "than": "then",
        "goes": "go",
        "went": "goed",
    }
    return " ".join(swaps.get(w, typo(w, rng) if rng.random() < 0.12 else w) for w in words)


def typo(word: str, rng: random.Random) -> str:
    """One slip of the keyboard inside `word`; words under four letters stay."""
    if len(word) < 4 or not word.isalpha():
        return word
    i = rng.randrange(1, len(word) - 1)
    return rng.choice(
        [word[:i] + word[i + 1] + word[i] + word[i + 2 :], word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:]]
    )


def terminals() -> Terminals:
    """The `{@name}` terminals of the grammar."""
    code, docs, sentences = library_text()
    days = [
        "Monday",
        "Tuesday",
        "Wednesday",
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "the 3rd of May",
        "June 12",
        "tomorrow",
    ]
    first = [
        "It was raining when {name} arrived in {place}.",
        "{name} had never liked {food}, until that evening.",
        "The {adj} {object} was gone.",
        "Nobody in {setting} had seen a {animal} before.",
        "On the night of the {event}, all the lights went out.",
        '"Don\'t open it," said the {job}.',
        "Once upon a time, in {setting}, there lived a {adj} {animal}.",
        "The letter came on a {adj} morning.",
        "I should have listened to my {relation2}.",
        "There are two things you should know about {name}.",
        "The {job} looked at the {object} and sighed.",
        "Every year, the {animal}s came back to {place}.",
    ]
    extra: Terminals = {
        "code": lambda r: r.choice(code),
        "doc": lambda r: r.choice(docs),
        "sentence": lambda r: r.choice(sentences),
        "int": lambda r: str(r.choice([r.randint(10, 99), r.randint(100, 999), r.randint(2, 40) * 5])),
        "small": lambda r: str(r.randint(2, 9)),
        "two": lambda r: f"{r.randint(0, 24):02d}",
        "pct": lambda r: str(r.choice([5, 10, 12, 15, 18, 20, 25, 30, 35, 40, 45, 60, 75, 80])),
        "day": lambda r: r.choice(days),
        "cent": lambda r: f"{r.randint(11, 19)}th",
        "letter": lambda r: r.choice("ABCDEFGHIKLMNOPRSTVW"),
    }
    extra["broken"] = lambda r: _broken(r, extra)
    extra["firstline"] = lambda r: expand(r.choice(first), r, extra)
    return extra
