from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.model

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
# Bytes that no token of the vocabulary stands for.
ABSENT = {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100), 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}


@pytest.fixture(scope="module")
def tokenizer(laptop_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(laptop_model, local_files_only=True)


def test_special_tokens(tokenizer: Any) -> None:
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert len(tokenizer) == 49152


def test_digits_stand_alone(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 12345 of 3.14") == [
        "in", "Ġ", "1", "2", "3", "4", "5", "Ġof", "Ġ", "3", ".", "1", "4",
    ]  # fmt: skip


def test_known_ids(tokenizer: Any) -> None:
    assert tokenizer.encode("Hello world") == [19556, 905]


def test_nothing_is_added(tokenizer: Any) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize(
    "text",
    [
        "naïve café",
        "👩‍👩‍👧‍👦 🇫🇷 🧑🏽‍🚀",
        "你好，世界。こんにちは 안녕",
        "  two  spaces\t\ttabs\n\n\nlines \r\n",
        "עברית العربية हिन्दी",
        "𝕏 𐍈",
        "a'll don't 'S",
        " ",
        "\u200b\ufeff\u00a0",
    ],
)
def test_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200)
@given(text=st.text(max_size=60).filter(lambda t: not set(t.encode()) & ABSENT))
def test_round_trip_of_anything(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_without_a_token_are_dropped_and_not_made_special(tokenizer: Any) -> None:
    ids = tokenizer.encode("a\x04b")
    assert tokenizer.decode(ids) == "ab" and 0 not in ids


def test_special_tokens_are_parsed_and_can_be_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"
    assert tokenizer.encode("<|endoftext|><repo_name><empty_output>") == [0, 3, 16]


def test_template_adds_the_default_system_prompt(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_template_keeps_the_users_system_prompt(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_template_ids_hold_special_ids(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (ids.count(1), ids.count(2)) == (3, 2)


@pytest.mark.slow
def test_ids_equal_transformers_own_conversion_but_for_digits(tokenizer: Any, laptop_gguf: Path) -> None:
    from transformers import AutoTokenizer

    # Its pre-tokenizer does not split digits, so the text has none.
    theirs = AutoTokenizer.from_pretrained(laptop_gguf.parent, gguf_file=laptop_gguf.name)
    for text in (
        "The quick brown fox's  jump;\n\n\tover!",
        "naïve 👩‍🚀 你好 (x_y)",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.encode(text) == theirs.encode(text)


def test_the_laptop_model_answers(laptop_model: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(laptop_model, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0].tolist()
    assert "Paris" in tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert output[-1] == 2
