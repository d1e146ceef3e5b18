"""The safetensors file format: streamed writing, and a check that costs one small read.

Written here rather than through the library because a file is streamed tensor by tensor with constant memory,
and a full disk is then an ordinary OSError. Format: 8 bytes little-endian header length, JSON header, data
(https://huggingface.co/docs/safetensors). Does not interpret tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.errors import ModelFetchError

_MAX_HEADER = 100 * 1024 * 1024  # the library's own limit
INDEX = "model.safetensors.index.json"


def write_bf16(path: Path, shapes: Mapping[str, tuple[int, ...]], chunks: Iterable[np.ndarray]) -> None:
    """Write one file of bf16 tensors.

    Args:
        shapes: name → shape, in the order of the data.
        chunks: uint16 arrays of bf16 bits that make up the tensors' data, one after another.

    Raises:
        ValueError: the chunks hold more or less than the shapes say.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for chunk in chunks:
            written += out.write(np.ascontiguousarray(chunk, dtype="<u2").data)
    if written != end:
        raise ValueError(f"{path.name}: {written} bytes of tensors instead of {end}")


def read_header(path: Path) -> dict[str, Any]:
    """Names, dtypes and shapes in a file, after checking that the file is as long as they need.

    Raises:
        ModelFetchError: not a safetensors file, or cut short.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            head = handle.read(8)
            if head.startswith(b"version "):
                raise ModelFetchError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`")
            length = struct.unpack("<Q", head)[0]
            if length > min(size, _MAX_HEADER):
                raise ValueError("header longer than the file")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ModelFetchError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelFetchError(f"{path} is not a safetensors file, or is damaged") from None
    if size != needed:
        raise ModelFetchError(f"{path} has {size} bytes instead of {needed}: it is damaged or incomplete")
    return dict(header)


def check_directory(directory: Path) -> dict[str, Any]:
    """The merged header of all weights in `directory`, each file checked as in `read_header`.

    Raises:
        ModelFetchError: no weights, a shard that the index names is missing, or a damaged file.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / shard for shard in shards]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelFetchError(f"{index} is damaged") from None
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ModelFetchError(f"{directory} lacks {', '.join(missing)}, named in {INDEX}")
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelFetchError(f"{directory} has no *.safetensors")
    return {name: entry for path in files for name, entry in read_header(path).items()}
