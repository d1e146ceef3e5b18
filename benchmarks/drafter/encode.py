"""Chats as one stream of int32 codes that a decoding graph can follow without the host.

Code ≥ START: first token of a chat. 0 ≤ code < START: a forced token. END: the chat is over. Other codes < 0: the
target writes from here until it emits `im_end` or a limit (see `pack_control`). After a control code comes END or a
forced `im_end`, which the reader skips when the target has just emitted it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

START = 1 << 20
END = -(1 << 30)
TEMPERATURES = [0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass
class Stream:
    """codes int32 [n]; offsets int64 [chats]: where each chat begins."""

    codes: np.ndarray
    offsets: np.ndarray

    def save(self, path: Path) -> None:
        """Write an .npz."""
        np.savez(path, codes=self.codes, offsets=self.offsets)

    @classmethod
    def load(cls, path: Path) -> Stream:
        """Read what `save` wrote."""
        with np.load(path) as f:
            return cls(f["codes"], f["offsets"])


def pack_control(limit: int, hot: int = 0, temperature: int = 0, user: bool = False) -> int:
    """limit < 1024 tokens; the first `hot` < 16 of them are drawn at T ≥ 1 and not learned; index into
    TEMPERATURES; user turn or assistant."""
    return -1 - (limit + 1024 * (hot + 16 * (temperature + 8 * int(user))))


def unpack_control(code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(limit, hot, temperature, user) of control codes; arbitrary for other codes."""
    import torch

    c = (-1 - code.long()).clamp(min=0, max=(1 << 19))
    table = torch.tensor([*TEMPERATURES, 0.0], device=code.device) if code.device.type == "cpu" else _table(code.device)
    return c % 1024, c // 1024 % 16, table[c // 16384 % 8], c // 131072 % 2


_tables: dict[Any, Tensor] = {}


def _table(device: Any) -> Tensor:
    """TEMPERATURES on a CUDA device; made once, because a copy from the host can't be captured."""
    import torch

    if device not in _tables:
        _tables[device] = torch.tensor([*TEMPERATURES, 0.0], device=device)
    return _tables[device]


@dataclass(frozen=True)
class Mix:
    """How replies are drawn: the share that is greedy throughout, greedy after a few hot tokens, and sampled."""

    greedy: float = 0.40
    hot: float = 0.33
    limits: tuple[int, ...] = (128, 192, 256, 320)

    def control(self, rng: random.Random) -> int:
        """The control code of one reply."""
        u, limit = rng.random(), rng.choice(self.limits)
        if u < self.greedy:
            return pack_control(limit)
        if u < self.greedy + self.hot:
            return pack_control(limit, hot=rng.randint(1, 10))
        return pack_control(limit, temperature=rng.choice([1, 2, 3, 4, 4, 4]))


def encode_chats(chats: Iterable[dict[str, Any]], tokenizer: Any, mix: Mix, seed: int, max_prompt: int = 400) -> Stream:
    """Tokenise `prompts.py`'s chats with the ChatML template. `tokenizer` is a `tokenizers.Tokenizer`; longer
    prompts are dropped."""
    rng = random.Random(seed)
    codes: list[int] = []
    offsets: list[int] = []
    batch: list[dict[str, Any]] = []
    for item in chats:
        batch.append(item)
        if len(batch) == 2000:
            _encode_batch(batch, tokenizer, mix, rng, codes, offsets, max_prompt)
            batch = []
    _encode_batch(batch, tokenizer, mix, rng, codes, offsets, max_prompt)
    return Stream(np.array(codes, dtype=np.int32), np.array(offsets, dtype=np.int64))


def _encode_batch(
    batch: list[dict[str, Any]],
    tokenizer: Any,
    mix: Mix,
    rng: random.Random,
    codes: list[int],
    offsets: list[int],
    max_prompt: int,
) -> None:
    pieces: list[str] = []
    for item in batch:
        system = item["system"] if item["system"] is not None else SYSTEM
        for i, turn in enumerate(item["turns"]):
            head = f"<|im_start|>system\n{system}<|im_end|>\n" if i == 0 else "<|im_end|>\n"
            tail = "" if item["primed"] else "<|im_end|>\n<|im_start|>assistant\n"
            pieces.append(f"{head}<|im_start|>user\n{turn}{tail}")
            if item["primed"]:
                pieces.append("<|im_end|>\n<|im_start|>assistant\n")
    ids = iter(tokenizer.encode_batch(pieces, add_special_tokens=False))
    for item in batch:
        chat: list[int] = []
        for turn in range(len(item["turns"])):
            prompt = next(ids).ids
            chat += prompt if chat else [prompt[0] + START, *prompt[1:]]
            too_long = len(prompt) > max_prompt
            if item["primed"]:
                chat.append(pack_control(rng.randint(6, 28), temperature=6, user=True))
                chat += next(ids).ids
            if too_long and turn == 0:
                chat = []
                for _ in item["turns"][1:]:
                    next(ids)
                break
            chat.append(mix.control(rng))
        if chat:
            offsets.append(len(codes))
            codes += [*chat, END]


def main(argv: list[str] | None = None) -> None:
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="Tokenise prompts.py's output into the stream that train.py reads.")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with args.prompts.open() as lines:
        stream = encode_chats(
            (json.loads(line) for line in lines), Tokenizer.from_file(str(args.tokenizer)), Mix(), args.seed
        )
    stream.save(args.out)
    print(f"{len(stream.offsets)} chats, {len(stream.codes)} codes")


if __name__ == "__main__":
    main()
