"""Reads names and labels out of PromQL; whether an expression is valid is for Prometheus to say."""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|\[[^\]]*\]|[A-Za-z_:][A-Za-z0-9_:]*|=~|!~|!=|[=!<>]=?|\S')
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "sum", "max", "min", "count", "avg", "topk", "s", "m", "h", "d"}


@dataclass
class Names:
    """`selectors`: (name, its labels, its text). `grouped`: labels of by, on and the like."""

    selectors: list[tuple[str, frozenset[str], str]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def names(expression: str) -> Names:
    tokens = _TOKEN.findall(re.sub(r"#.*", "", expression))
    found, at = Names(), 0
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        at += 1
        if not re.match(r"[A-Za-z_:]", token) or re.match(r"\d", tokens[at - 2] if at > 1 else ""):
            continue
        if token in _GROUPING:
            end = tokens.index(")", at)
            found.grouped |= {label for label in tokens[at + 1 : end] if label != ","}
            at = end + 1
        elif following == "{":
            end = tokens.index("}", at)
            inside = tokens[at + 1 : end]
            found.selectors.append((token, frozenset(inside[::4]), token + "{" + "".join(inside) + "}"))
            at = end + 1
        elif following != "(" and token not in _WORDS:
            found.selectors.append((token, frozenset(), token))
    return found
