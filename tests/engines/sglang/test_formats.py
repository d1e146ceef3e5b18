"""Well-formed calls in every format that SGLang has, by its own parsers: told whole, however their tokens came."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.formats import FORMATS
from tests.engines.sglang.parsers import Rig, tool, write_marked

STEPS = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}}}
WHERE = {"type": "object", "properties": {"x": {"type": "number"}, "name": {"type": "string"}}}
TOOLS = (tool("weather", city={"type": "string"}), tool("now"), tool("plan", steps=STEPS, where=WHERE))
CITY, NOW = ("weather", {"city": 'Paris é 🌍, [a] {b} "c" \\ d\ne'}), ("now", dict[str, Any]())
NESTED = ("plan", {"steps": [{"a": 1}, {"a": 2}], "where": {"x": 1.5, "name": "n [é]"}})
LONG = ("weather", {"city": "lorem ipsum é [x], " * 60 + "end"})
CALLS = {
    "one": [CITY],
    "none": [NOW],
    "nested": [NESTED],
    "two": [CITY, NOW],
    "three": [NOW, NESTED, CITY],
    "long": [LONG, CITY],
}
TEXT = 'I look at [a](b), a < b, x[1]: {"c": ["d"]} </p>.'
# What SGLang's own parser knows one call of an answer in.
SINGLE = ("gigachat3",)


@pytest.fixture(scope="module")
def path(sglang_on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_marked(tmp_path_factory.mktemp("marked"))


def splits(text: str) -> Iterator[list[str]]:
    """The same text in pieces of its own: one, each character, and as chance has it."""
    chance = random.Random(1)
    yield [text]
    yield list(text)
    for longest in (2, 3, 5, 8, 13, 21, 40):
        pieces, at = [], 0
        while at < len(text):
            end = at + chance.randint(1, longest)
            pieces.append(text[at:end])
            at = end
        yield pieces


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_format_are_told_however_tokens_come(path: Path, name: str) -> None:
    rig = Rig(path, name.split()[0])
    plan = rig.plan(tools=TOOLS)
    for kind, calls in CALLS.items():
        calls = calls[:1] if name in SINGLE else calls
        for before in ("", "I look.\n"):
            text = before + FORMATS[name](calls)
            for pieces in splits(text):
                told = rig.read(plan, pieces)
                assert (told.called, told.content.strip()) == (calls, before.strip()), (kind, pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_told_as_it_is(path: Path, name: str) -> None:
    rig = Rig(path, name.split()[0])
    plan = rig.plan(tools=TOOLS)
    for pieces in splits(TEXT):
        told = rig.read(plan, pieces)
        assert (told.content, told.calls) == (TEXT, {}), pieces


def test_every_format_of_sglang_is_here(path: Path) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    # Of these models SGLang encodes the prompt, which is a configuration error.
    encoded = {"deepseekv32", "deepseekv4", "kimi_k3", "inkling"}
    same = {"glm": "glm45", "qwen25": "qwen"}
    classes = FunctionCallParser.ToolCallParserEnum
    assert all(classes[one] is classes[other] for one, other in same.items())
    assert {name.split()[0] for name in FORMATS} == set(classes) - encoded - set(same)


def mistral(*names: str) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{name}", "arguments": {{}}}}' for name in names) + "]"


@pytest.mark.parametrize(
    ("text", "fields", "content", "called"),
    [
        (mistral("now", "weather") + " Then [x].", {}, " Then [x].", ["now", "weather"]),
        (mistral("now") + mistral("weather"), {}, "", ["now", "weather"]),
        (mistral("now", "weather") + " Then", {"parallel_tool_calls": False}, "", ["now"]),
        (mistral("now", "weather") + " Then", {"tool_choice": "required"}, "", ["now", "weather"]),
        (mistral("now", "nope"), {}, ', {"name": "nope", "arguments": {}}]', ["now"]),
        (mistral("now", "weather")[:-2], {}, ', {"name": "weather", "arguments": {}', ["now"]),
    ],
)
def test_a_list_of_calls_in_brackets_ends_where_it_is_closed(
    path: Path, text: str, fields: dict[str, Any], content: str, called: list[str]
) -> None:
    """Behind its first call SGLang's parser of Mistral's takes the rest for text."""
    rig = Rig(path, "mistral")
    plan = rig.plan(tools=TOOLS, **fields)
    for pieces in splits(text):
        told = rig.read(plan, pieces)
        assert (told.content, told.called) == (content, [(name, {}) for name in called]), pieces


CHANNEL, START = "<|channel|>", "<|start|>assistant"
THOUGHT = f"{CHANNEL}analysis<|message|>My analysis: a < b.<|end|>"
PREAMBLE = f"{CHANNEL}commentary<|message|>I look for commentary.<|end|>"
FINAL = f"{CHANNEL}final<|message|>Here is my analysis of <b> things."
WEATHER = FORMATS["gpt-oss"]([CITY])
# The messages of an answer of gpt-oss, their reasoning, content and calls.
HARMONY: list[tuple[list[str], str, str, list[Any]]] = [
    ([FINAL], "", "Here is my analysis of <b> things.", []),
    ([THOUGHT, FINAL], "My analysis: a < b.", "Here is my analysis of <b> things.", []),
    ([THOUGHT, WEATHER], "My analysis: a < b.", "", [CITY]),
    ([PREAMBLE, WEATHER], "", "I look for commentary.", [CITY]),
    ([THOUGHT, PREAMBLE, WEATHER], "My analysis: a < b.", "I look for commentary.", [CITY]),
    ([THOUGHT, WEATHER, FORMATS["gpt-oss"]([NOW])], "My analysis: a < b.", "", [CITY, NOW]),
    (["Hello."], "", "Hello.", []),
]


@pytest.mark.parametrize("parser", [None, "gpt-oss"])
@pytest.mark.parametrize(("messages", "reasoning", "content", "calls"), HARMONY)
def test_messages_of_gpt_oss_are_told_apart(
    path: Path, messages: list[str], reasoning: str, content: str, calls: list[Any], parser: str | None
) -> None:
    """Reasoning is told where it has a parser, and never as content."""
    rig = Rig(path, "gpt-oss", parser)
    plan = rig.plan(tools=TOOLS)
    for pieces in splits(START.join(messages)):
        told = rig.read(plan, pieces)
        assert (told.reasoning, told.content, told.called) == (reasoning if parser else "", content, calls), pieces


@pytest.mark.parametrize("parser", [None, "gpt-oss"])
def test_what_is_no_call_of_gpt_oss_is_text(path: Path, parser: str | None) -> None:
    rig = Rig(path, "gpt-oss", parser)
    plan = rig.plan(tools=TOOLS)
    for text in (FORMATS["gpt-oss"]([("nope", {"a": 1})]), WEATHER.replace("}<|call|>", "<|call|>")):
        for pieces in splits(text):
            assert (told := rig.read(plan, pieces)).content == text and not told.calls


@pytest.mark.parametrize("parser", [None, "gpt-oss"])
def test_a_call_is_told_where_its_closing_mark_ends_the_answer(path: Path, parser: str | None) -> None:
    """gpt-oss ends its turn with it, so it is no text."""
    rig = Rig(path, "gpt-oss", parser)
    (call,) = rig.ids("<|call|>")
    plan, answer = rig.plan(tools=TOOLS), rig.ids(THOUGHT + START + WEATHER)
    for told in (rig.told(plan, answer, ends=(2, call)), rig.told(plan, answer, ends=(2,), stop_token_ids=(call,))):
        assert (told.called, told.content, told.finish) == ([CITY], "", "tool_calls")
    # Nothing ends with what only looks like it.
    told = rig.told(plan, rig.ids(WEATHER), ends=(2,), stop=("<|call|>",))
    assert (told.calls, told.finish) == ({}, "stop")
