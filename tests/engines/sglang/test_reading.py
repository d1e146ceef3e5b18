"""Answers read by SGLang's own parsers: what is told, and that it does not depend on how the tokens came."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engines.local.stopping import Ending
from serve_app.engines.sglang.reading import Call, Said, ToolReader
from serve_app.errors import InvalidRequest
from tests.engines.sglang.parsers import Rig, write_marked

HELLO = "Hello there, a < b."
WEATHER, NOW = '{"name": "weather", "arguments": {"city": "Paris é 🌍 \\"q\\""}}', '{"name": "now", "arguments": {}}'
CLOSING = ("weather", {"city": "</tool_call>"})
PARIS = ("weather", {"city": 'Paris é 🌍 "q"'})


def block(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def kimi(*calls: tuple[str, str]) -> str:
    begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    inner = "".join(f"{begin}{name}{arguments}{text}{end}" for name, text in calls)
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def deepseek(*calls: tuple[str, str]) -> str:
    begin, end = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    inner = "\n".join(f"{begin}{name}\n```json\n{text}\n```{end}" for name, text in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


CITY = '{"city": "Paris é 🌍 \\"q\\""}'
KIMIS = ("functions.weather:0", CITY), ("functions.now:1", "{}")
DEEPSEEKS = ("weather", CITY), ("now", "{}")
# Parser, answer, content, calls with their arguments as JSON.
WELL: list[tuple[str, str, str, list[Any]]] = [
    *((parser, HELLO, HELLO, []) for parser in ("qwen", "hermes", "kimi_k2", "deepseekv3")),
    *((parser, block(WEATHER), "", [PARIS]) for parser in ("qwen", "hermes")),
    *(
        (parser, "I look.\n\n" + block(WEATHER, NOW) + "\n", "I look.", [PARIS, ("now", {})])
        for parser in ("qwen", "hermes")
    ),
    ("qwen", block('{"name": "now"}'), "", [("now", {})]),
    ("qwen", block('{"arguments": {"city": "x"}, "name": "weather"}'), "", [("weather", {"city": "x"})]),
    ("hermes", block('{"name": "weather", "arguments": {"city": "</tool_call>"}}') + "x", "\nx", [CLOSING]),
    ("hermes", f"<tool_call>{NOW}</tool_call>", "", [("now", {})]),
    ("kimi_k2", "I look. " + kimi(("functions.weather:0", CITY), ("now:1", "{}")), "I look.", [PARIS, ("now", {})]),
    ("kimi_k2", kimi(("functions.now:0", "{}")) + " Done.", " Done.", [("now", {})]),
    ("deepseekv3", "I look.\n" + deepseek(("weather", CITY), ("now", "{}")), "I look.", [PARIS, ("now", {})]),
]  # fmt: skip
# What is no call, or not a whole one: parser, answer, content, calls as they were told.
ILL: list[tuple[str, str, str, list[list[str]]]] = [
    ("qwen", "a <tool", "a <tool", []),
    ("qwen", block('{"name": "nope", "arguments": {"a": 1}}') + "x", None, []),
    ("qwen", block("no JSON at all") + " and more", None, []),
    ("qwen", '<tool_call>\n{"name": "wea', None, []),
    ("qwen", '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', "", [["weather", '{"city": "P']]),
    (
        "qwen",
        block('{"name": "weather", "arguments": {"city": Paris}}', NOW),
        '"arguments": {"city": Paris}}\n</tool_call>',
        [["weather", ""], ["now", "{}"]],
    ),
    ("kimi_k2", "<|tool_calls_section_begin|> text", None, []),
    ("kimi_k2", kimi(("functions.nope:0", '{"a": 1}')) + "x", None, []),
    (
        "kimi_k2",
        kimi(("functions.now:0", "{}"), ("functions.nope:1", "{}")),
        "<|tool_call_end|><|tool_call_begin|>functions.nope:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [["now", "{}"]],
    ),
    ("deepseekv3", deepseek(("nope", "{}")) + "x", None, []),
    ("kimi_k2", kimi(("oops oops", "{}")) + "x", None, []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.wea", None, []),
    ("kimi_k2", kimi(("functions.weather:0", '{"city": Pa}')), "", [["weather", '{"city": Pa}']]),
    ("deepseekv3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w", None, []),
    ("deepseekv3", deepseek(("weather", '{"city": Pa}')), "", [["weather", '{"city": Pa}']]),
]  # type: ignore[list-item]
THOUGHT: list[tuple[str, str, str, str, list[Any]]] = [
    ("qwen3", "<think>hm é</think>\n\nHi < a", "hm é", "\n\nHi < a", []),
    ("qwen3", "hm\n</think>\n\n" + block(NOW), "hm\n", "", [("now", {})]),
    ("qwen3", "hm " + block(NOW), "hm ", "", [("now", {})]),  # a call ends the reasoning
    ("qwen3", "hm </thi", "hm </thi", "", []),
    ("deepseek-r1", "hm\n</think>Hi", "hm\n", "Hi", []),
    ("deepseek-r1", "<think>hm</think>" + block(NOW), "hm", "", [("now", {})]),
]


@pytest.fixture(scope="module")
def path(sglang_on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_marked(tmp_path_factory.mktemp("marked"))


def everywhere(rig: Rig, text: str, **fields: Any) -> Any:
    """What is told of an answer, asserted to be the same for every place where another replica went on, and however
    many tokens came at once."""
    plan = rig.plan(**fields)
    told = rig.told(plan, text)
    for cut in range(len(rig.ids(text)) + 1):
        for step in (0, 1, 3):
            other = rig.told(plan, text, cut=cut, block=step)
            other.ids = told.ids  # random but for some formats
            assert other == told, (cut, step)
    return told


@pytest.mark.parametrize(("parser", "text", "content", "calls"), WELL)
def test_calls_are_told_wherever_the_answer_was_cut(
    path: Path, parser: str, text: str, content: str, calls: list[Any]
) -> None:
    told = everywhere(Rig(path, parser), text)
    assert (told.content, told.called, told.finish) == (content, calls, "tool_calls" if calls else "stop")
    assert len(set(told.ids)) == len(calls)


@pytest.mark.parametrize(("parser", "text", "content", "calls"), ILL)
def test_what_is_no_call_is_text(
    path: Path, parser: str, text: str, content: str | None, calls: list[list[str]]
) -> None:
    told = everywhere(Rig(path, parser), text)
    assert (told.content, list(told.calls.values())) == (text if content is None else content, calls)


@pytest.mark.parametrize(("parser", "text", "reasoning", "content", "calls"), THOUGHT)
def test_reasoning_is_told_apart_wherever_the_answer_was_cut(
    path: Path, parser: str, text: str, reasoning: str, content: str, calls: list[Any]
) -> None:
    told = everywhere(Rig(path, "qwen", parser), text)
    assert (told.reasoning, told.content, told.called) == (reasoning, content, calls)


def test_reasoning_tokens_are_counted_with_their_mark(path: Path) -> None:
    rig = Rig(path, None, "qwen3")
    text = "<think>hm</think>Hi"
    told = everywhere(rig, text, tools=None)
    assert told.reasoning_tokens == len(rig.ids("<think>hm</think>")) == 4


def test_the_limit_within_a_call_is_a_limit(path: Path) -> None:
    rig = Rig(path, "qwen")
    text = block(WEATHER)
    most = len(rig.ids(text[: text.index("é")]))
    told = rig.told(rig.plan(), text, max_tokens=most)
    assert (told.finish, told.calls[0][0]) == ("length", "weather") and WEATHER.count(told.calls[0][1]) == 1


def test_arguments_that_only_the_whole_text_gives_are_not_told_as_text_too(path: Path) -> None:
    """SGLang's reading of Qwen's XML in pieces waits for the end of a parameter, which the limit cuts off."""
    told = everywhere(Rig(path, "qwen3_coder"), "<tool_call>\n<function=weather>\n<parameter=city>\nParis and")
    assert (told.content, told.called) == ("", [("weather", {"city": "Paris and"})])


@pytest.mark.parametrize(("stop", "finish"), [("Paris", "stop"), ("</tool_call>", "tool_calls")])
def test_a_stop_that_cuts_a_call_is_a_stop(path: Path, stop: str, finish: str) -> None:
    rig = Rig(path, "qwen")
    told = rig.told(rig.plan(), block(WEATHER, NOW), stop=(stop,))
    assert (told.finish, len(told.calls), told.content) == (finish, 1, "")


def test_a_stop_string_that_may_begin_a_mark_changes_nothing(path: Path) -> None:
    rig = Rig(path, "qwen", "qwen3")
    text = "hm</think>Hi\n" + block(NOW)
    assert rig.told(rig.plan(), text, stop=("<|", "\n\n")).called == [("now", {})]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("behind", ["\nYou can try", "\n"])
@pytest.mark.parametrize(
    ("parser", "one", "two"),
    [
        *((parser, block(WEATHER), block(WEATHER, NOW)) for parser in ("qwen", "hermes")),
        ("kimi_k2", kimi(KIMIS[0]), kimi(*KIMIS)),
        ("deepseekv3", deepseek(DEEPSEEKS[0]), deepseek(*DEEPSEEKS)),
        ("llama3", "<|python_tag|>" + WEATHER.replace("arguments", "parameters"), ""),
    ],
)
def test_an_answer_that_may_have_one_call_ends_with_it(
    path: Path, parser: str, one: str, two: str, behind: str, choice: str
) -> None:
    rig = Rig(path, parser)
    for text in (one, two):
        if text:
            told = everywhere(rig, text + behind, parallel_tool_calls=False, tool_choice=choice)
            assert (told.called, told.finish, told.content) == ([PARIS], "tool_calls", "")


@pytest.mark.parametrize("parser", ["qwen", "hermes"])
def test_an_only_call_ends_the_answer_at_its_last_token(path: Path, parser: str) -> None:
    rig = Rig(path, parser)
    stream = rig.stream(rig.plan(parallel_tool_calls=False))
    call, behind = rig.ids(block(WEATHER)), rig.ids(" and more")
    assert stream.push([*call, *behind])[0] == len(call)


@pytest.mark.parametrize(
    ("parser", "calls"),
    [
        *((parser, block(WEATHER, NOW)) for parser in ("qwen", "hermes")),
        ("kimi_k2", kimi(*KIMIS)),
        ("deepseekv3", deepseek(*DEEPSEEKS)),
    ],
)
def test_an_answer_held_to_calls_ends_where_text_follows_them(path: Path, parser: str, calls: str) -> None:
    rig = Rig(path, parser)
    for behind in ("", "\n", "\nYou can try", " x " + block(NOW)):
        told = everywhere(rig, calls + behind, tool_choice="required")
        assert (told.called, told.finish, told.content) == ([PARIS, ("now", {})], "tool_calls", "")
    assert everywhere(rig, calls + "\nYou can try").content.strip() == "You can try"


def test_held_back_text_behind_the_calls_is_none_of_the_answer(path: Path) -> None:
    """What may still become a mark when the tokens are over."""
    rig = Rig(path, "qwen")
    stream = rig.stream(rig.plan(tool_choice="required"))
    assert stream.push(rig.ids(block(WEATHER) + " <tool"))[2] is None
    assert (stream.finish(), stream.ended(Ending("length"))) == ("", Ending("tool_calls"))


def test_an_answer_that_has_all_of_its_calls_stays_so() -> None:
    """Also where a parser gives text together with the mark behind them."""
    told = {"</call>": ("behind", []), "{}": ("", [SimpleNamespace(tool_index=0, name="now", parameters="{}")])}
    parser = SimpleNamespace(
        opening="<call>",
        closing="</call>",
        left=-1,
        parse_stream_chunk=lambda text: told.get(text, ("", [])),
        parse_non_stream=lambda text: ("", []),
    )
    reader, said = ToolReader(lambda: parser, {"now"}, lambda name, index: "id", one=False, must=True), Said()
    for piece in ("<call>", "{}", "</call>"):
        reader.push(piece, said)
    reader.end(said)
    assert (reader.full, said.content, [call.arguments for call in reader.calls]) == (True, "", ["{}"])


def test_kimis_ids_count_on_from_the_history(path: Path) -> None:
    rig = Rig(path, "kimi_k2")
    call = {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "functions.now:0"},
    ]
    told = rig.told(rig.plan(messages=history), kimi(("functions.weather:1", CITY), ("functions.now:2", "{}")))
    assert told.ids == ["functions.weather:1", "functions.now:2"]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[{"name": "weather", "parameters": {"city": "x"}}, {"name": "now", "parameters": {}}]', None),
        # A space that SGLang's reading in pieces does not get over.
        ('[{"name":"weather","parameters":{"city":"x"}} , {"name":"now","parameters":{}}]', None),
        ('[{"name": "weather", "parameters": {"ci', [["weather", ""]]),
    ],
)
def test_an_array_of_calls_is_read_where_the_grammar_is_one(
    path: Path, text: str, calls: list[list[str]] | None
) -> None:
    rig = Rig(path, "qwen", backend="llguidance")
    told = everywhere(rig, text, tool_choice="required")
    assert told.content == ""
    if calls is None:
        assert told.called == [("weather", {"city": "x"}), ("now", {})]
    else:
        assert list(told.calls.values()) == calls


@pytest.mark.parametrize("one", [False, True])
def test_brackets_within_arguments_are_no_marks_of_an_array(path: Path, one: bool) -> None:
    """They are tokens of their own, and the marks by which SGLang's parser of an array knows it."""
    rig = Rig(path, "qwen", backend="llguidance")
    arguments = {"a": [1, 2], "b": [[3], [4]], "city": "]["}
    call = '{"name": "weather", "parameters": ' + json.dumps(arguments) + "}"
    behind = "" if one else ', {"name": "now", "parameters": {}}'
    told = everywhere(rig, f"[{call}{behind}]", tool_choice="required", parallel_tool_calls=not one)
    assert (told.content, told.finish) == ("", "tool_calls")
    assert told.called == [("weather", arguments), *([] if one else [("now", {})])]


def test_what_was_told_as_text_is_no_call_too() -> None:
    """Where the reading of the whole text finds a call that the one in pieces gave as text."""
    items = [SimpleNamespace(tool_index=index, name="now", parameters="{}") for index in range(2)]
    told = {"call": ("", items[:1]), "text": ("text", [])}
    parser = SimpleNamespace(
        opening="<call>",
        closing="",
        left=-1,
        parse_stream_chunk=lambda text: told.get(text, ("", [])),
        parse_non_stream=lambda text: ("", items),
    )
    reader, said = ToolReader(lambda: parser, {"now"}, lambda name, index: "id", one=False, must=False), Said()
    for piece in ("<call>", "call", "text"):
        reader.push(piece, said)
    reader.end(said)
    assert (said.content, len(reader.calls)) == ("text", 1)


def test_mistrals_compact_calls_are_told_where_brackets_are_tokens(path: Path) -> None:
    rig = Rig(path, "mistral")
    told = everywhere(rig, '[TOOL_CALLS]weather[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}')
    assert (told.content, told.called) == ("", [("weather", {"city": "x"}), ("now", {})])


def test_an_array_that_ends_before_its_first_call_is_text(path: Path) -> None:
    rig = Rig(path, "qwen", backend="llguidance")
    assert rig.told(rig.plan(tool_choice="required", named_tool="now"), '[{"na').content == '[{"na'


def test_tokens_that_already_end_the_answer_cannot_be_continued(path: Path) -> None:
    rig = Rig(path, "qwen")
    with pytest.raises(InvalidRequest) as caught:
        rig.stream(rig.plan(), max_tokens=2).resume(rig.ids("ab"))
    assert caught.value.param == "emitted"


def test_arguments_nested_beyond_reading_are_not_whole() -> None:
    call = Call("f")
    call.arguments = "[" * 100_000
    assert not call.whole


def test_a_parser_that_fails_costs_no_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(path, "qwen")
    plan = rig.plan()

    def broken(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr("sglang.srt.function_call.qwen25_detector.Qwen25Detector.parse_streaming_increment", broken)
    monkeypatch.setattr("sglang.srt.function_call.qwen25_detector.Qwen25Detector.detect_and_parse", broken)
    told = rig.told(plan, "Hi\n" + block(NOW))
    assert (told.content, told.calls, told.finish) == ("Hi\n" + block(NOW), {}, "stop")


@pytest.mark.parametrize("parser", ["qwen", "deepseekv3"])
def test_a_long_call_is_read_in_fewer_pieces(path: Path, parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser reads the whole of it for each: as many as its tokens would cost the square of its length."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    rig = Rig(path, parser)
    long = json.dumps({"city": "lorem ipsum " * 500})
    text = (
        deepseek(("weather", long)) if parser == "deepseekv3" else block(f'{{"name": "weather", "arguments": {long}}}')
    )
    pieces = []
    whole = FunctionCallParser.parse_stream_chunk
    monkeypatch.setattr(
        FunctionCallParser, "parse_stream_chunk", lambda self, text: (pieces.append(text), whole(self, text))[1]
    )
    told = rig.told(rig.plan(), text)
    assert told.called == [("weather", json.loads(long))] and len(told.calls[0][1]) == len(long)
    assert len(pieces) < 500 < len(rig.ids(text)) / 10
