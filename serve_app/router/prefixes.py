"""Which replica was sent which prompt prefixes lately: a bounded table of chained block hashes.

A prompt is cut into blocks of text; a block's hash covers everything before it, so that one lookup per block finds how
far a replica shares a prompt. The table forgets what was used longest ago.

What this module does not do: see what a replica's cache really holds; it only knows what was sent there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from serve_app.engines.base import GenerateRequest

# Replicas remembered per block: a shared system prompt is everywhere.
HOLDERS = 8


class PrefixTable:
    """Args:
    max_blocks: blocks it remembers at most.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def overlaps(self, blocks: Sequence[int], names: Collection[str]) -> dict[str, float]:
        """Share of the blocks, from the first on, that each of `names` was sent; those without any are left out."""
        depth: dict[str, int] = {}
        for at, block in enumerate(blocks):
            holders = self._holders.get(block, ())
            going_on = [name for name in holders if depth.get(name, 0) == at and name in names]
            if not going_on:
                break
            for name in going_on:
                depth[name] = at + 1
        return {name: count / len(blocks) for name, count in depth.items()}

    def sent(self, blocks: Sequence[int], name: str) -> None:
        """Remember that a prompt went to a replica."""
        for block in blocks:
            holders = self._holders.pop(block, ())
            # The newest last, which is also the block's place in the order of forgetting.
            self._holders[block] = (*(h for h in holders if h != name), name)[-HOLDERS:]
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def forget(self, name: str) -> None:
        """A replica is gone."""
        for block, holders in list(self._holders.items()):
            if name in holders:
                left = tuple(h for h in holders if h != name)
                if left:
                    self._holders[block] = left
                else:
                    del self._holders[block]


def blocks_of(request: GenerateRequest, block_chars: int) -> list[int]:
    """Chained hashes of a prompt's whole blocks, and of the rest."""
    hashes: list[int] = []
    text, chain = "", 0
    for piece in _pieces(request):
        text += piece
        while len(text) >= block_chars:
            chain = hash((chain, text[:block_chars]))
            hashes.append(chain)
            text = text[block_chars:]
    # The last, unfinished block is not shared with the next turn, which goes on behind it.
    return hashes or [hash((chain, text))]


def home_key(request: GenerateRequest, session: str) -> str:
    """What the turns of one chat have in common: the session, else everything up to the first user message."""
    if session:
        return session
    if request.messages is None:
        return request.prompt[:256] if request.prompt is not None else str((request.prompt_token_ids or ())[:64])
    key = []
    for message in request.messages:
        key.append(str(message.get("content"))[:256])
        if message.get("role") == "user":
            break
    return "\0".join(key)


def _pieces(request: GenerateRequest) -> Iterator[str]:
    if request.messages is not None:
        for message in request.messages:
            yield f"\0{message.get('role')}\0{message.get('content')}"
    elif request.prompt is not None:
        yield request.prompt
    else:
        yield " ".join(map(str, request.prompt_token_ids or ()))
