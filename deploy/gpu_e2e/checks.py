"""What the official client must get from the running application: one function per promise of docs/api.md.

A check that raises has failed; its words are the report's.

What this module does not do: start anything, or look into the engine (`cases` does).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import openai

from deploy.gpu_e2e.settings import MODEL_ID

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"enum": [1000, 20000, 3000000]}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": ARGUMENTS},
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
GREEDY = {"model": MODEL_ID, "temperature": 0}


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def run_all(checks: dict[str, Callable[..., None]], *arguments: Any) -> dict[str, str]:
    """name → "ok" or what was wrong."""
    found = {}
    for name, check in checks.items():
        try:
            check(*arguments)
            found[name] = "ok"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[1:2]
            line = f" ({where[0].line})" if where else ""
            found[name] = f"{type(error).__name__}: {error}{line}"[:600]
    return found


def client(url: str) -> openai.OpenAI:
    """It repeats nothing."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def models(c: openai.OpenAI) -> None:
    assert [model.id for model in c.models.list()] == [MODEL_ID]
    assert c.models.retrieve(MODEL_ID).id == MODEL_ID


def chat(c: openai.OpenAI) -> None:
    answer = c.chat.completions.create(**GREEDY, messages=say("Name three colours."), max_tokens=40)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def streams(c: openai.OpenAI) -> None:
    asked = {**GREEDY, "messages": say("Count from one to ten."), "max_tokens": 60}
    whole = c.chat.completions.create(**asked)
    chunks = list(c.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == whole.choices[0].finish_reason and not any(ends[:-1])


def usage_is_sent_only_when_asked_for(c: openai.OpenAI) -> None:
    chunks = c.chat.completions.create(**GREEDY, messages=say("Hi"), max_tokens=4, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def completions(c: openai.OpenAI) -> None:
    answer = c.completions.create(**GREEDY, prompt=["The capital of France is", "1, 2, 3,"], max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Paris" in answer.choices[0].text, answer.choices[0].text


def logprobs(c: openai.OpenAI) -> None:
    answer = c.chat.completions.create(
        **GREEDY, messages=say("Name a fruit."), max_tokens=12, logprobs=True, top_logprobs=5
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 1e-4 and len(entry.top_logprobs) == 5
        # Greedy: the token is the best one, up to what the verification's rounding decides.
        assert entry.logprob >= max(other.logprob for other in entry.top_logprobs) - 0.1, entry


def several_choices(c: openai.OpenAI) -> None:
    asked = {"model": MODEL_ID, "messages": say("Invent a word."), "n": 3, "max_tokens": 24}
    answer = c.chat.completions.create(**asked, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 3 * 24


def stop_strings(c: openai.OpenAI) -> None:
    asked = {**GREEDY, "messages": say("Count from one to ten in words, separated by commas."), "max_tokens": 60}
    whole = c.chat.completions.create(**asked).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = c.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)], (stop, cut.message.content, whole)
    assert cut.finish_reason == "stop"
    chunks = c.chat.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cut.message.content


def either_limit(c: openai.OpenAI) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = c.chat.completions.create(**GREEDY, messages=say("Tell a long story."), **{field: 10})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")


def json_schema(c: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    ended = 0
    for temperature in (0, 0.5, 1.0, 1.0):
        answer = c.chat.completions.create(
            model=MODEL_ID, messages=say("Describe a city."), response_format=wanted, max_tokens=150,
            temperature=temperature,
        )  # fmt: skip
        ended += follows(answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert ended, "no document was ended"


def follows(text: str, reason: str | None) -> bool:
    """Whether it is a whole document of SCHEMA; at its token limit it is the beginning of one, with room for spaces."""
    assert text.lstrip().startswith("{"), text
    if reason == "length":
        return False
    document = json.loads(text)
    assert set(document) == {"city", "people"} and isinstance(document["people"], int), document
    return True


def json_object(c: openai.OpenAI) -> None:
    answer = c.chat.completions.create(
        **GREEDY, messages=say("Give me JSON with one short field."), max_tokens=300,
        response_format={"type": "json_object"},
    )  # fmt: skip
    choice = answer.choices[0]
    # At its token limit it is the beginning of a document.
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


def a_tool_that_must_be_called_is(c: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    asked = {"model": MODEL_ID, "messages": say("What is the weather in Rome?"), "max_tokens": 200}
    for choice, temperature in (("required", 0), (NAMED, 0), ("required", 0.8), (NAMED, 1.0)):
        answer = c.chat.completions.create(
            **asked, tools=[strict], tool_choice=choice, parallel_tool_calls=False, temperature=temperature, n=2
        )
        assert len(answer.choices) == 2
        for one in answer.choices:
            assert one.finish_reason == "tool_calls" and one.message.content is None, one
            (call,) = one.message.tool_calls
            assert call.id and call.type == "function" and call.function.name == "weather", call
            said = json.loads(call.function.arguments)
            assert said["city"] in ("Paris", "Rome") and said["days"] in (1, 2, 3), said


def a_call_streams(c: openai.OpenAI) -> None:
    asked = {
        **GREEDY, "messages": say("What is the weather in Rome?"), "max_tokens": 200, "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True}}], "tool_choice": NAMED,
    }  # fmt: skip
    (whole,) = c.chat.completions.create(**asked).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in c.chat.completions.create(**asked, stream=True)]
    pieces = [call for choice in chunks for call in choice.delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    first, *rest = pieces
    assert first.id and first.type == "function" and first.function.name == "weather", first
    assert not any(piece.id or piece.function.name for piece in rest)
    text = "".join(piece.function.arguments or "" for piece in pieces)
    assert json.loads(text) == json.loads(whole.function.arguments), (text, whole)
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["tool_calls"]


def a_tool_may_be_called(c: openai.OpenAI) -> None:
    asked = {"model": MODEL_ID, "messages": say("What is the weather in Rome?"), "max_tokens": 80}
    for temperature in (0, 0.7, 1.0):
        one = c.chat.completions.create(**asked, tools=[WEATHER, NOW], temperature=temperature).choices[0]
        assert (one.finish_reason == "tool_calls") <= bool(one.message.tool_calls), one
        assert one.message.content or one.message.tool_calls, one
        for call in one.message.tool_calls or []:
            assert call.function.name in ("weather", "now"), call
    none = c.chat.completions.create(**asked, tools=[WEATHER], tool_choice="none", temperature=0)
    plain = c.chat.completions.create(**asked, temperature=0)
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content == plain.choices[0].message.content


def a_tool_gives_its_answer(c: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *say("What time is it?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is noon."},
    ]
    answer = c.chat.completions.create(**GREEDY, messages=history, tools=[NOW], max_tokens=40)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    without = c.chat.completions.create(**GREEDY, messages=history[:1], tools=[NOW], max_tokens=4)
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens


def wrong_tools_are_named(c: openai.OpenAI) -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": 5}}}
    for asked, param in (
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "logprobs": True}, "logprobs"),
        ({"tools": [NOW, schema]}, "tools[1].function.parameters"),
        ({"functions": [NOW["function"]]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ):
        error = _refused(c, **asked)
        assert error.type == "invalid_request_error" and error.param == param, (asked, error)


def errors(c: openai.OpenAI) -> None:
    for asked, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
    ):
        error = _refused(c, **asked)
        assert error.type == "invalid_request_error" and error.param == param, (asked, error)
    assert _refused(c, max_tokens=999_999).code == "context_length_exceeded"
    try:
        c.chat.completions.create(model="no-such-model", messages=say("hi"))
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")


def _refused(c: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
    try:
        c.chat.completions.create(**{"model": MODEL_ID, "messages": say("hi"), **fields})
    except openai.BadRequestError as error:
        return error
    raise AssertionError(f"{fields} was accepted")


CHECKS: dict[str, Callable[[openai.OpenAI], None]] = {
    check.__name__: check
    for check in (
        models, chat, streams, usage_is_sent_only_when_asked_for, completions, logprobs, several_choices, stop_strings,
        either_limit, json_schema, json_object, a_tool_that_must_be_called_is, a_call_streams, a_tool_may_be_called,
        a_tool_gives_its_answer, wrong_tools_are_named, errors,
    )
}  # fmt: skip
