"""A Llama-architecture GGUF file into a directory that transformers and SGLang load: bf16, once.

Direct: rows are dequantised by the `gguf` package and written as they come. Refuses every architecture it was not
checked for. The tokenizer is `tokenizer.py`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize, quantize

from serve_app.errors import ModelFetchError
from serve_app.models import tokenizer, weights

CHUNK_ELEMENTS = 1 << 20  # bounds the float32 copy, which the dequantiser multiplies several times

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, out: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer files into `out`.

    Args:
        on_progress: called with bytes written so far and in all.

    Raises:
        ModelFetchError: not a GGUF file, or one of an architecture or tokenizer that this does not know.
        OSError: as the file system says.
    """
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelFetchError(f"{gguf.name} is not a GGUF file that can be read: {error}") from None
    meta = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
    config = llama_config(meta, tied="lm_head.weight" not in tensors)
    _check_complete(tensors, config)
    _write_json(out / "config.json", config)
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(out / "generation_config.json", {key: config[key] for key in tokens})
    tokenizer.write_tokenizer(meta, out)
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    total = 2 * sum(int(np.prod(shape)) for shape in shapes.values())

    def chunks() -> Iterator[np.ndarray]:
        done = 0
        for name, tensor in tensors.items():
            for chunk in bf16_chunks(name, tensor, config):
                yield chunk
                done += chunk.nbytes
                on_progress(done, total)

    weights.write_bf16(out / "model.safetensors", shapes, chunks())


def hf_name(name: str) -> str:
    """The transformers name of a GGUF tensor: `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        if part := _BLOCK.get(found[2]):
            return f"model.layers.{found[1]}.{part}.weight"
    elif (stem := name.removesuffix(".weight")) in _TOP:
        return f"{_TOP[stem]}.weight"
    raise ModelFetchError(f"the GGUF file has a tensor {name} that a Llama model does not")


def llama_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """transformers' LlamaConfig from GGUF metadata.

    Raises:
        ModelFetchError: another architecture, scaled RoPE, or a key is missing.
    """
    if meta.get("general.architecture") != "llama" or "llama.rope.scaling.type" in meta:
        raise ModelFetchError("only GGUF files of the llama architecture with plain RoPE can be converted")
    try:
        heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
            "dtype": "bfloat16",
            "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
            "head_dim": meta.get("llama.rope.dimension_count", hidden // heads),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": meta["llama.feed_forward_length"],
            "max_position_embeddings": meta["llama.context_length"],
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": meta["llama.block_count"],
            "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
            "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"]),
            # Stored as float32: 9.9999997e-06 is 1e-05.
            "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
            "rope_theta": float(meta.get("llama.rope.freq_base", 10000.0)),
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        }
    except KeyError as error:
        raise ModelFetchError(f"the GGUF file lacks the metadata {error.args[0]}") from None


def bf16_chunks(name: str, tensor: ReaderTensor, config: dict[str, Any]) -> Iterator[np.ndarray]:
    """The bf16 bits of one tensor in transformers' row order, as flat uint16 arrays of about `CHUNK_ELEMENTS`."""
    rows = np.atleast_2d(tensor.data)
    if name.endswith(".q_proj.weight"):
        rows = rows[unpermute(len(rows), config["num_attention_heads"])]
    elif name.endswith(".k_proj.weight"):
        rows = rows[unpermute(len(rows), config["num_key_value_heads"])]
    step = max(1, CHUNK_ELEMENTS // int(tensor.shape[0]))
    for start in range(0, len(rows), step):
        values = dequantize(rows[start : start + step], tensor.tensor_type)
        yield quantize(values, GGMLQuantizationType.BF16).view(np.uint16).reshape(-1)


def unpermute(rows: int, heads: int) -> np.ndarray:
    """Row order [rows] that undoes llama.cpp's, which interleaves the two halves that transformers' RoPE rotates."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _check_complete(tensors: dict[str, ReaderTensor], config: dict[str, Any]) -> None:
    wanted = {f"model.layers.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in _BLOCK.values()}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight"}
    if missing := sorted(wanted - tensors.keys()):
        raise ModelFetchError(f"the GGUF file lacks {len(missing)} tensors, among them {missing[0]}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
