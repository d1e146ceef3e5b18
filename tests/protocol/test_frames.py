"""Chunks → frames and bodies."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from serve_app.engines.base import Chunk, GenerateRequest, SamplingParams, TokenLogprob, Usage
from serve_app.errors import EngineFailed
from serve_app.protocol import Job, Progress, Renderer, error_frames


def make_job(*, chat: bool = True, stream: bool = True, usage: bool = False, n: int = 1, prompts: int = 1) -> Job:
    request = GenerateRequest("r", SamplingParams(n=n, logprobs=0), prompt="p")
    return Job("id", 7, "m", chat, stream, usage, (request,) * prompts)


def events(data: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def chunk(text: str, index: int = 0, finish: Any = None, usage: Usage | None = None, **more: Any) -> Chunk:
    return Chunk(index, (1,), text, finish_reason=finish, usage=usage, **more)


def test_the_first_delta_has_the_role_and_later_ones_do_not() -> None:
    renderer = Renderer(make_job())
    deltas = [events(renderer.frame(0, chunk(t)))[0]["choices"][0]["delta"] for t in ("a", "b")]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}]


def test_each_choice_gets_a_role() -> None:
    renderer = Renderer(make_job(n=2))
    deltas = [events(renderer.frame(0, chunk("a", i)))[0]["choices"][0]["delta"] for i in (0, 1)]
    assert all(d["role"] == "assistant" for d in deltas)


def test_text_that_is_held_back_makes_no_frame_after_the_first() -> None:
    renderer = Renderer(make_job())
    assert renderer.frame(0, chunk("")) != b""
    assert renderer.frame(0, chunk("")) == b""


def test_an_end_without_text_still_says_why() -> None:
    renderer = Renderer(make_job())
    renderer.frame(0, chunk("a"))
    assert events(renderer.frame(0, chunk("", finish="length")))[0]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


def test_envelope_is_the_same_in_every_frame() -> None:
    renderer = Renderer(make_job(usage=True))
    frames = events(renderer.frame(0, chunk("a")) + renderer.frame(0, chunk("b", finish="stop")) + renderer.end())[:-1]
    assert {(f["id"], f["object"], f["created"], f["model"]) for f in frames} == {
        ("id", "chat.completion.chunk", 7, "m")
    }


def test_usage_comes_once_last_and_without_choices() -> None:
    renderer = Renderer(make_job(usage=True))
    first = events(renderer.frame(0, chunk("a", finish="stop", usage=Usage(5, 1, 2))))[0]
    last, done = events(renderer.end())
    assert (first["usage"], last["choices"], done) == (None, [], "[DONE]")
    assert last["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


def test_usage_is_absent_unless_asked_for() -> None:
    renderer = Renderer(make_job())
    assert "usage" not in events(renderer.frame(0, chunk("a", finish="stop", usage=Usage(5, 1))))[0]
    assert events(renderer.end()) == ["[DONE]"]


def test_choices_of_a_prompt_share_its_tokens_in_the_usage() -> None:
    renderer = Renderer(make_job(stream=False, chat=False, n=2, prompts=2))
    for prompt in range(2):
        for index in range(2):
            renderer.collect(prompt, chunk("x", index, "stop", Usage(10, 3)))
    usage = json.loads(renderer.body())["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 12)


def test_choices_are_ordered_by_prompt_then_index() -> None:
    renderer = Renderer(make_job(stream=False, chat=False, n=2, prompts=2))
    for prompt in (1, 0):
        for index in (1, 0):
            renderer.collect(prompt, chunk(f"{prompt}{index}", index, "stop"))
    assert [c["text"] for c in json.loads(renderer.body())["choices"]] == ["00", "01", "10", "11"]


def test_streamed_text_equals_the_whole_body() -> None:
    pieces = [" a", "", "🌍é", "\n b "]
    streamed, whole = Renderer(make_job()), Renderer(make_job(stream=False))
    text = ""
    for piece in pieces:
        for event in events(streamed.frame(0, chunk(piece))):
            text += event["choices"][0]["delta"].get("content", "")
        whole.collect(0, chunk(piece))
    assert json.loads(whole.body())["choices"][0]["message"]["content"] == text == "".join(pieces)


def logprob(raw: bytes, value: float = -0.5) -> TokenLogprob:
    return TokenLogprob(1, raw.decode("utf-8", "replace"), tuple(raw), value)


def test_chat_logprobs_carry_bytes_and_alternatives() -> None:
    one = TokenLogprob(1, "a", (97,), -0.5, (logprob(b"b", -1.5),))
    entry = events(Renderer(make_job()).frame(0, chunk("a", logprobs=(one,))))[0]["choices"][0]["logprobs"]
    assert entry["content"] == [
        {
            "token": "a", "logprob": -0.5, "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}],
        }
    ]  # fmt: skip


def test_a_probability_of_zero_stays_valid_json() -> None:
    data = Renderer(make_job()).frame(0, chunk("a", logprobs=(logprob(b"a", float("-inf")),)))
    assert events(data)[0]["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [True, False])
def test_legacy_offsets_count_characters_even_when_a_character_spans_tokens(stream: bool) -> None:
    renderer = Renderer(make_job(chat=False, stream=stream))
    raw = [b"a", b"\xf0\x9f", b"\x8c\x8d", "é".encode(), b"z"]
    offsets: list[int] = []
    for piece in raw:
        one = chunk("", logprobs=(logprob(piece),))
        if stream:
            offsets += events(renderer.frame(0, one))[0]["choices"][0]["logprobs"]["text_offset"]
        else:
            renderer.collect(0, one)
    if not stream:
        offsets = json.loads(renderer.body())["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "raw",
    [
        [b"\xf0\x9f", b"region", b"z"],
        [b"\xf0", "\u0435".encode(), b"z"],
        [b"\xf0", b"\x80", b"z"],
        [b"\xef\xbf", b"\xbd", b"z"],
        [b"a", b"\xf0\x9f", b"", b"z"],
    ],
)
def test_legacy_offsets_count_characters_that_broke_off(raw: list[bytes]) -> None:
    renderer = Renderer(make_job(chat=False, stream=False))
    for piece in raw:
        renderer.collect(0, chunk("", logprobs=(logprob(piece),)))
    offset = json.loads(renderer.body())["choices"][0]["logprobs"]["text_offset"][-1]
    assert b"".join(raw).decode("utf-8", "replace")[offset:] == "z"


def test_parsed_deltas_pass_through() -> None:
    data = Renderer(make_job()).frame(0, chunk("", delta={"reasoning_content": "hm"}))
    assert events(data)[0]["choices"][0]["delta"] == {"role": "assistant", "reasoning_content": "hm"}


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_told_in_pieces_are_whole_in_the_body() -> None:
    renderer = Renderer(make_job(stream=False))
    for entries in ([call(0, "", "f")], [call(0, '{"a"'), call(1, "{", "g")], [call(0, ": 1}")], [call(1, "}")]):
        renderer.collect(0, chunk("", delta={"tool_calls": entries, "reasoning_content": "h"}))
    renderer.collect(0, chunk("", finish="tool_calls"))
    message = json.loads(renderer.body())["choices"][0]["message"]
    assert message["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert (message["content"], message["reasoning_content"]) == (None, "hhhh")


def test_the_official_client_puts_streamed_calls_together() -> None:
    renderer, state = Renderer(make_job()), ChatCompletionStreamState()
    for made in (
        chunk("", delta={"reasoning_content": "h"}),
        chunk("I look.", delta={"tool_calls": [call(0, '{"a": ', "f")]}),
        chunk("", delta={"tool_calls": [call(0, "1}"), call(1, "{", "g")]}),
        chunk("", finish="tool_calls", delta={"tool_calls": [call(1, "}")]}),
    ):
        for event in events(renderer.frame(0, made)):
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
    choice = state.get_final_completion().choices[0]
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] == [
        ("c0", "f", '{"a": 1}'),
        ("c1", "g", "{}"),
    ]


def test_a_call_goes_on_behind_what_another_replica_sent() -> None:
    sent = (Progress(0, (1, 1)),)
    renderer = Renderer(replace(make_job(), sent=sent))
    delta = events(renderer.frame(0, chunk("", delta={"tool_calls": [call(0, "1}")]})))[0]["choices"][0]["delta"]
    assert delta == {"tool_calls": [call(0, "1}")]}


def test_text_beside_calls_is_the_content() -> None:
    renderer = Renderer(make_job(stream=False))
    renderer.collect(0, chunk("I look.", delta={"tool_calls": [call(0, "{}", "f")]}))
    assert json.loads(renderer.body())["choices"][0]["message"]["content"] == "I look."


def test_each_choice_has_calls_of_its_own() -> None:
    renderer = Renderer(make_job(stream=False, n=2))
    for index, name in enumerate("fg"):
        renderer.collect(0, chunk("", index, "tool_calls", delta={"tool_calls": [call(0, "{}", name)]}))
    choices = json.loads(renderer.body())["choices"]
    assert [choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices] == ["f", "g"]


@pytest.mark.parametrize(
    ("counted", "details"), [((3, 4), {"completion_tokens_details": {"reasoning_tokens": 7}}), ((3, None), {})]
)
def test_reasoning_tokens_are_stated_where_all_are_known(counted: tuple[int | None, ...], details: Any) -> None:
    renderer = Renderer(make_job(stream=False, n=2))
    for index, tokens in enumerate(counted):
        renderer.collect(0, chunk("x", index, "stop", Usage(5, 9, reasoning_tokens=tokens)))
    usage = json.loads(renderer.body())["usage"]
    assert {key: usage[key] for key in usage if key == "completion_tokens_details"} == details


def test_a_failure_is_one_error_frame_and_then_done() -> None:
    error, done = events(error_frames(EngineFailed("no")))
    assert (error["error"]["code"], done) == ("engine_error", "[DONE]")
