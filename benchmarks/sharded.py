"""A model with more attention heads than it has, so that ranks can share them: the same function of its inputs.

The laptop model has nine heads in three groups, which no even number of ranks divides. Groups are added whose weights
are zero: their values are zero, whatever their scores, and so is what the output projection takes from them. The
drafter gets the same.

What this module does not do: make a model faster; the added heads are computed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"


def shards(model: Path, ranks: int) -> bool:
    """Whether `ranks` can share the heads of the model in this directory as they are."""
    config = json.loads((model / "config.json").read_text())
    return config[_HEADS] % ranks == 0 and config.get(_GROUPS, config[_HEADS]) % ranks == 0


def write(model: Path, into: Path, ranks: int) -> Path:
    """Write the model (or drafter) of directory `model` with heads that `ranks` can share, below `into`, which is made.

    Attention must be of grouped queries: `self_attn.{q,k,v}_proj.weight` of heads × head_dim rows, `o_proj` of as many
    columns.
    """
    config = json.loads((model / "config.json").read_text())
    heads = config[_HEADS]
    groups = config.get(_GROUPS, heads)
    size = config.get("head_dim") or config["hidden_size"] // heads
    more = -groups % ranks
    added = {"q_proj": more * heads // groups, "k_proj": more, "v_proj": more, "o_proj": more * heads // groups}
    into.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            save_file({name: _padded(name, tensor, added, size) for name, tensor in tensors.items()}, into / file.name)
        elif file.name not in ("config.json", "manifest.json") and file.is_file():
            shutil.copy(file, into)
    config |= {_HEADS: heads + added["q_proj"], _GROUPS: groups + more, "head_dim": size}
    (into / "config.json").write_text(json.dumps(config, indent=1))
    return into


def write_pair(model: Path, drafter: Path, into: Path, ranks: int) -> tuple[Path, Path]:
    """Target and drafter for `ranks`, below `into`, or as they are where they shard."""
    found: list[Any] = [
        path if shards(path, ranks) else write(path, into / name, ranks)
        for name, path in (("target", model), ("drafter", drafter))
    ]
    return found[0], found[1]


def _padded(name: str, tensor: Tensor, added: dict[str, int], size: int) -> Tensor:
    *_, block, projection, kind = ("", "", *name.split("."))
    if block != "self_attn" or projection not in added or kind != "weight":
        return tensor
    rows = added[projection] * size
    return pad(tensor, (0, rows) if projection == "o_proj" else (0, 0, 0, rows)).contiguous()
