"""The fast tokenizer of a GGUF file: byte-level BPE with SmolLM's pre-tokenizer (digits stand alone).

SmolLM2's vocabulary lacks the bytes that no training text had (C0 control characters such as 0x04, and 0xF1/0xF2,
which begin unassigned planes); as in the original tokenizer such bytes are dropped, not mapped to a special token.
Does not handle SentencePiece vocabularies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve_app.errors import ModelFetchError

_CONTROL = 3  # GGUF's token type of special tokens


def write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `out`.

    Raises:
        ModelFetchError: another kind of tokenizer, or a key is missing.
    """
    kind = (meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelFetchError(f"the GGUF file's tokenizer {'/'.join(map(str, kind))} is not one that can be converted")
    try:
        build(meta).save(str(out / "tokenizer.json"))
        config = tokenizer_config(meta)
    except KeyError as error:
        raise ModelFetchError(f"the GGUF file lacks the metadata {error.args[0]}") from None
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def build(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer from `tokenizer.ggml.*` metadata."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return result


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by the ids in the metadata, and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    eos = meta["tokenizer.ggml.eos_token_id"]
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos],
        "model_max_length": meta["llama.context_length"],
        "pad_token": tokens[meta.get("tokenizer.ggml.padding_token_id", eos)],
        # The generic class keeps tokenizer.json as it is; named ones rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)],
    }
