"""Which replica was sent which prompt prefixes lately: a bounded table of chained block hashes.

A prompt is cut into blocks of text; a block's hash covers everything before it, so that one lookup per block finds how
far a replica shares a prompt. The table forgets what was used longest ago.

What this module does not do: see what a replica's cache really holds; it only knows what was sent there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from serve_app.engines.base import GenerateRequest
from serve_app.router.ring import place

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

    def holders(self, block: int) -> tuple[str, ...]:
        """Who was sent it, and with it everything before it; the newest last."""
        return self._holders.get(block, ())

    def overlaps(self, blocks: Sequence[int], names: Collection[str], common: int = 0) -> dict[str, float]:
        """Share of the blocks, from the first on, that each of `names` was sent; those without any are left out.

        Args:
            common: blocks at the beginning that many chats have alike (`common_blocks`); they count for nothing.
        """
        depth: dict[str, int] = {}
        for at, block in enumerate(blocks, 1):
            # A block stands for everything before it, even where the list of an earlier one has forgotten a holder.
            depth.update({name: at for name in self.holders(block) if name in names})
        own = len(blocks) - common
        return {name: (count - common) / own for name, count in depth.items() if count > common}

    def sent(self, blocks: Iterable[int], name: str) -> None:
        """Remember that a prompt went to a replica."""
        for block in blocks:
            holders = self._holders.pop(block, ())
            if not holders or holders[-1] != name:
                # The newest last, which is also the block's place in the order of forgetting.
                holders = (*(h for h in holders if h != name), name)[-HOLDERS:]
            self._holders[block] = holders
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
    text = "".join(_pieces(request))
    hashes: list[int] = []
    chain = 0
    # The last, unfinished block is not shared with the next turn, which goes on behind it.
    for end in range(block_chars, len(text) + 1, block_chars):
        chain = hash((chain, text[end - block_chars : end]))
        hashes.append(chain)
    return hashes or [hash((chain, text))]


def common_blocks(request: GenerateRequest, block_chars: int) -> int:
    """Whole blocks before the first user message. Every replica soon holds a system prompt; if it attracted, each
    ingress would crowd the replicas that it happened to send it to first, and others than its peers."""
    chars = 0
    for message, piece in zip(request.messages or (), _pieces(request), strict=False):
        if message.get("role") == "user":
            break
        chars += len(piece)
    return chars // block_chars


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


def beginning(request: GenerateRequest) -> str:
    """A name of what a chat may have in common with others, the starts of its messages before the first user's; "" for
    none. It is short however many these are, since routers remember thousands."""
    key = []
    for message in request.messages or ():
        if message.get("role") == "user":
            break
        key.append(str(message.get("content"))[:256])
    text = "\0".join(key)
    return f"{place(text):016x}" if text else ""


def _pieces(request: GenerateRequest) -> Iterator[str]:
    if request.messages is not None:
        for message in request.messages:
            yield f"\0{message.get('role')}\0{message.get('content')}"
    elif request.prompt is not None:
        yield request.prompt
    else:
        yield " ".join(map(str, request.prompt_token_ids or ()))
