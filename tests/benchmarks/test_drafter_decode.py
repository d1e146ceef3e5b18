"""The target writes what plain decoding of the same prompts gives, follows its stream, and keeps the right features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.drafter import plain
from benchmarks.drafter.decode import Pool, Writer
from benchmarks.drafter.encode import END, START, Mix, Stream, encode_chats, pack_control, unpack_control
from benchmarks.drafter.target import Target, read_directory, rope_tables, tiny_target

IM_END, LENGTH, ROWS, LAYER_IDS = 2, 48, 3, [0, 2]


def naive_forward(target: Target, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(logits [n, V], output of each layer [n, H]): the whole text at once, causal."""
    s = target.shape
    x, n, outputs = F.embedding(torch.tensor(tokens), target.embed), len(tokens), []
    cos, sin = rope_tables(s, n, x.device)
    for layer in target.layers:
        h = plain.rms_norm(x, layer["norm1"], s.eps)
        qkv = F.linear(h, layer["qkv"]).view(n, -1, s.head_dim)
        q, k = plain.rotate(qkv[:, : s.heads], cos, sin), plain.rotate(qkv[:, s.heads : s.heads + s.kv_heads], cos, sin)
        q, k, v = (t.transpose(0, 1) for t in (q, k, qkv[:, s.heads + s.kv_heads :]))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + F.linear(out.transpose(0, 1).reshape(n, -1), layer["o"])
        h = plain.rms_norm(x, layer["norm2"], s.eps)
        x = x + F.linear(plain.swiglu(F.linear(h, layer["gate_up"])), layer["down"])
        outputs.append(x)
    return F.linear(plain.rms_norm(x, target.norm, s.eps), target.embed), outputs


def stream(chats: list[list[int]]) -> Stream:
    offsets = np.cumsum([0] + [len(c) for c in chats[:-1]])
    return Stream(np.array([code for chat in chats for code in chat], dtype=np.int32), offsets)


def write(chats: list[list[int]]) -> tuple[Target, Pool]:
    target = tiny_target()
    pool = Pool.allocate(ROWS, LENGTH, 2 * target.shape.hidden, target.shape.hidden, torch.device("cpu"), torch.float32)
    Writer(target, LAYER_IDS, pool, ROWS, stream(chats), plain, IM_END).fill(0)
    return target, pool


ONE_TURN = [[9 + i + START, 5, 40 + i, pack_control(20), END] for i in range(7)]


def test_greedy_text_equals_plain_decoding() -> None:
    target, pool = write(ONE_TURN)
    for row in range(ROWS):
        text = pool.tokens[row].tolist()
        end = next((i for i in range(3, LENGTH) if pool.start[row, i] > 0), LENGTH)
        assert text[:3] == [9 + row, 5, 40 + row]
        for i in range(3, min(end, 23)):
            assert text[i] == naive_forward(target, text[:i])[0][-1].argmax()


def test_features_and_last_state_are_those_of_the_whole_text() -> None:
    target, pool = write(ONE_TURN)
    n = next(i for i in range(3, LENGTH) if pool.start[0, i] > 0)
    logits, outputs = naive_forward(target, pool.tokens[0, :n].tolist())
    features = torch.cat([outputs[i] for i in LAYER_IDS], -1)
    torch.testing.assert_close(pool.features[0, :n], features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(F.linear(pool.last[0, :n], target.embed), logits, rtol=1e-4, atol=1e-3)


def test_a_later_chat_of_a_row_sees_nothing_of_the_first() -> None:
    target, pool = write(ONE_TURN)
    row = pool.start[0]
    begin = int(next(i for i in range(LENGTH) if row[i] > 0))
    same = (row == begin).nonzero()[:, 0]
    _, outputs = naive_forward(target, pool.tokens[0, same].tolist())  # rotary positions are relative
    got = pool.features[0, same, : target.shape.hidden]
    torch.testing.assert_close(got, outputs[0], rtol=1e-3, atol=1e-3)


def test_prompt_tokens_are_not_learned_and_replies_are() -> None:
    _, pool = write(ONE_TURN)
    assert pool.label[:, :3].sum() == 0
    assert pool.label[:, 3].all()


def test_hot_tokens_are_not_learned() -> None:
    _, pool = write([[9 + i + START, 5, pack_control(20, hot=4), END] for i in range(5)])
    assert pool.label[:, 2:6].sum() == 0
    assert pool.label[:, 6].all()


def test_the_second_turn_follows_the_first_reply() -> None:
    turn = [9 + START, 5, pack_control(4), IM_END, 7, 8, pack_control(30), END]
    _, pool = write([turn] * 4)
    text = pool.tokens[0].tolist()
    cut = text.index(IM_END)
    assert cut <= 6, "the reply ends by itself or at its limit"
    assert text[cut : cut + 3] == [IM_END, 7, 8]
    assert pool.label[0, cut + 1 : cut + 3].sum() == 0
    assert pool.label[0, cut + 3] == 1


@pytest.mark.parametrize("hot,temperature,user", [(0, 0, False), (15, 6, True), (7, 4, False)])
def test_control_codes_survive_packing(hot: int, temperature: int, user: bool) -> None:
    code = torch.tensor([pack_control(300, hot, temperature, user)], dtype=torch.int32)
    limit, got_hot, temp, got_user = (x.item() for x in unpack_control(code))
    assert (limit, got_hot, got_user) == (300, hot, int(user))
    assert temp == pytest.approx([0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0][temperature])
    assert END < code < 0


class Letters:
    """One token per character: enough of a tokenizer to encode chats."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Letters]:
        return [Letters.of(text) for text in texts]

    @classmethod
    def of(cls, text: str) -> Letters:
        made = cls()
        made.ids = [ord(c) % 100 + 3 for c in text]
        return made


def test_encoded_chats_have_one_control_per_turn_and_end() -> None:
    chats = [
        {"system": None, "turns": ["a", "b"], "primed": False},
        {"system": "s", "turns": ["q"], "primed": True},
        {"system": None, "turns": ["x" * 900], "primed": False},
    ]
    made = encode_chats(chats, Letters(), Mix(), seed=1)
    assert len(made.offsets) == 2, "a prompt that is too long is dropped"
    first, second = np.split(made.codes, made.offsets[1:])
    for codes, controls in ((first, 2), (second, 2)):
        assert codes[-1] == END and codes[0] >= START
        assert ((codes < 0) & (codes > END)).sum() == controls


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_directory_writes_what_transformers_generates(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    torch.manual_seed(1)
    make, tied = (LlamaConfig, True) if family == "llama" else (Qwen3Config, False)
    config = make(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    target = read_directory(tmp_path).to(torch.device("cpu"), torch.float32)
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    pool = Pool.allocate(1, 20, 64, 32, torch.device("cpu"), torch.float32)
    Writer(target, LAYER_IDS, pool, 1, stream([[9 + START, 5, pack_control(40), END]]), plain, -5).fill(0)
    out = model(pool.tokens.long(), output_hidden_states=True)
    assert pool.tokens[0, 2:].tolist() == out.logits[0, 1:-1].argmax(-1).tolist()
    features = torch.cat([out.hidden_states[i + 1] for i in LAYER_IDS], -1)
    torch.testing.assert_close(pool.features, features, rtol=1e-3, atol=1e-3)
