"""Whether a text repeats, or nearly repeats, one of a set of held-out prompts. Words only: no tokens, no meaning."""

from __future__ import annotations

import re


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation: what overlap is measured on."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Overlap:
    """Finds texts that equal or nearly equal one of the held-out prompts.

    Near: half of the held-out text's word trigrams appear, or any run of eight words does, or the same set of words
    in any order.
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
        return any(
            len(self.grams[i][1] & three) * 2 >= len(self.grams[i][1]) or self.grams[i][2] & eight for i in candidates
        )
