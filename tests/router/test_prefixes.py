"""The table of prefixes against plain comparison of texts, and its bounds."""

import random
from typing import Any

from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.router.prefixes import HOLDERS, PrefixTable, beginning, blocks_of, common_blocks, home_key


def chat(*contents: str) -> GenerateRequest:
    roles = ["system", "user", "assistant"]
    messages: list[dict[str, Any]] = [
        {"role": roles[min(i, 1) if i < 2 else 2 - i % 2], "content": c} for i, c in enumerate(contents)
    ]
    return GenerateRequest("r", SamplingParams(), messages=messages)


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def plain(text: str) -> GenerateRequest:
    return GenerateRequest("r", SamplingParams(), prompt=text)


def test_a_block_covers_everything_before_it() -> None:
    one, other = blocks_of(plain("a" * 64 + "b" * 64), 64), blocks_of(plain("c" * 64 + "b" * 64), 64)
    assert len(one) == 2 and one[1] != other[1]


def test_the_next_turn_shares_all_whole_blocks() -> None:
    first = chat("s" * 100, "u" * 100)
    second = chat("s" * 100, "u" * 100, "answer " * 20, "and then?")
    blocks = blocks_of(first, 32)
    assert blocks_of(second, 32)[: len(blocks)] == blocks


def test_overlap_is_the_shared_part_of_the_prompt() -> None:
    rng, table = random.Random(3), PrefixTable(10_000)
    sent: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    for _ in range(200):
        text = "".join(rng.choice("xy") * 8 for _ in range(rng.randrange(1, 12)))
        found = table.overlaps(blocks_of(plain(text), 8), sent)
        for name, texts in sent.items():
            shared = max((common(text, other) // 8 for other in texts), default=0)
            assert round(found.get(name, 0) * len(text) / 8) == shared
        name = rng.choice(list(sent))
        table.sent(blocks_of(plain(text), 8), name)
        sent[name].append(text)


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    table = PrefixTable(100)
    old, fresh = blocks_of(plain("old " * 40), 16), blocks_of(plain("new " * 40), 16)
    table.sent(old, "a")
    for i in range(500):
        table.sent([i], "b")
        table.sent(fresh, "a")
    assert len(table) == 100
    assert table.overlaps(old, {"a"}) == {} and table.overlaps(fresh, {"a"}) == {"a": 1.0}


def test_a_prefix_that_is_everywhere_is_remembered_of_a_few() -> None:
    table = PrefixTable(100)
    for i in range(50):
        table.sent([1], f"r{i}")
    assert len(table.overlaps([1], {f"r{i}" for i in range(50)})) == HOLDERS


def test_a_lost_replica_is_forgotten() -> None:
    table = PrefixTable(100)
    table.sent([1, 2], "a")
    table.sent([1], "b")
    table.forget("a")
    assert table.overlaps([1, 2], {"a", "b"}) == {"b": 0.5} and len(table) == 1


def test_turns_of_a_chat_have_one_home_key_and_chats_differ() -> None:
    first, second = chat("system", "hello"), chat("system", "hello", "hi", "more")
    assert home_key(first, "") == home_key(second, "") != home_key(chat("system", "other"), "")


def test_a_session_is_its_own_key() -> None:
    assert home_key(chat("system", "hello"), "s1") == "s1"


def test_a_system_prompt_attracts_nothing() -> None:
    table, system = PrefixTable(1000), "s" * 200
    first, other = chat(system, "u" * 100), chat(system, "v" * 100)
    table.sent(blocks_of(first, 32), "a")
    assert table.overlaps(blocks_of(other, 32), {"a"}, common_blocks(other, 32)) == {}
    assert table.overlaps(blocks_of(first, 32), {"a"}, common_blocks(first, 32)) == {"a": 1.0}


def test_without_a_chat_nothing_is_common() -> None:
    assert common_blocks(plain("x" * 500), 32) == 0


def test_a_beginning_has_a_short_name_however_long_it_is() -> None:
    def begun(systems: int, end: str = "") -> str:
        messages = [{"role": "system", "content": "s" * 300 + str(i)} for i in range(systems)]
        messages += [{"role": "developer", "content": end}, {"role": "user", "content": "hello"}]
        return beginning(GenerateRequest("r", SamplingParams(), messages=messages))

    assert len(begun(2000, "a")) == len(begun(1, "a")) == 16
    assert begun(9, "a") == begun(9, "a") != begun(9, "b")
    assert beginning(chat("", "hello")) == beginning(plain("hello")) == ""
