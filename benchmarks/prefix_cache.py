"""What the routing benchmarks have in common: a bounded prefix cache as engines keep one, and texts.

What this module does not do: take time; see `routing` for simulated time and `served_routing` for real time.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

CHARS_PER_TOKEN, BLOCK_CHARS = 4, 64
TOKENS_PER_BLOCK = BLOCK_CHARS // CHARS_PER_TOKEN


class BlockCache:
    """Chained block hashes (`serve_app.router.prefixes`), at most `blocks` of them; the longest unused go first."""

    def __init__(self, blocks: int) -> None:
        self.most = blocks
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, prompt: Sequence[int]) -> int:
        """Keep a prompt's blocks; returns how many of the first were there."""
        hit = next((at for at, block in enumerate(prompt) if block not in self._kept), len(prompt))
        for block in prompt:
            self._kept.pop(block, None)
            self._kept[block] = None
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)
        return hit


def words(rng: random.Random, chars: int) -> str:
    """Text that nobody else has, of about so many characters."""
    return "".join(f"{rng.randrange(10**7)} " for _ in range(chars // 8))
