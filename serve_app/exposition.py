"""Several processes' pages in Prometheus's text format as one, each sample labelled with its process.

Works on lines and parses no values: with 64 replicas a page has thousands of samples, and an event loop waits for it.

What this module does not do: fetch pages (see `exporter`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def merge(texts: Mapping[str, str]) -> bytes:
    """One exposition: each family once, every sample with the label `replica`. `_created` series are left out.

    Args:
        texts: replica → page as prometheus_client writes it, a family's samples right below its HELP and TYPE.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        label = f'replica="{_escaped(replica)}"'
        for name, head, lines in _families(text):
            if name.endswith("_created"):
                continue
            heads.setdefault(name, head)
            samples.setdefault(name, []).extend([_labelled(line, label) for line in lines])
    merged = [line for name, head in heads.items() for line in (*head, *samples[name])]
    return "".join(f"{line}\n" for line in merged).encode()


def _families(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(name, its comment lines, its samples) for each family of a page."""
    name, head, lines = "", [], []  # type: tuple[str, list[str], list[str]]
    for line in text.split("\n"):
        if line.startswith("#"):
            word = line.split(" ", 3)
            if len(word) < 4 or word[1] not in ("HELP", "TYPE"):
                continue
            if word[2] != name:
                if name:
                    yield name, head, lines
                name, head, lines = word[2], [], []
            head.append(line)
        elif line and name:
            lines.append(line)
    if name:
        yield name, head, lines


def _labelled(line: str, label: str) -> str:
    """The sample with one more label, put first."""
    name, brace, rest = line.partition("{")
    if not brace or " " in name:  # a brace behind the name's end would be part of no label set
        name, _, value = line.partition(" ")
        return f"{name}{{{label}}} {value}"
    return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
