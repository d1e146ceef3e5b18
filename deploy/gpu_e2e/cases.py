"""What people reported against engines with speculative decoding, asked of the running application over HTTP.

Each function is one symptom; the URL is where it was reported (S is github.com/sgl-project/sglang, V
github.com/vllm-project/vllm, Z github.com/z-lab/dflash; /issues/N also reaches a pull request).

What this module does not do: reports that need another configuration, more GPUs or the engine's inside (tests/gpu).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.gpu_e2e.checks import NAMED, NOW, SCHEMA, WEATHER, follows, say
from deploy.gpu_e2e.settings import MODEL_ID
from load_tests.chaos import invalid_bodies
from load_tests.scrape import Page, growth, parse, total

CHAT = "/v1/chat/completions"
LONG = "Write a long story about a lighthouse keeper and his dog."


@dataclass
class Server:
    """The application under test. `drafts`: it has a drafter."""

    http: httpx.Client
    drafts: bool

    def ask(self, messages: Any, status: int = 200, **fields: Any) -> Any:
        body = {"model": MODEL_ID, "messages": messages, "temperature": 0, **fields}
        return self.post(CHAT, body, status)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, (answer.status_code, answer.text[:300])
        return answer.json()

    def text(self, messages: Any, **fields: Any) -> str:
        return str(self.ask(messages, **fields)["choices"][0]["message"]["content"])

    def stream(self, messages: Any, **fields: Any) -> str:
        body = {"model": MODEL_ID, "messages": messages, "temperature": 0, "stream": True, **fields}
        text, last = "", ""
        with self.http.stream("POST", CHAT, json=body) as answer:
            for line in answer.iter_lines():
                last = line or last
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        assert last == "data: [DONE]", last
        return text

    def page(self) -> Page:
        return parse(self.http.get("/metrics").text)


def server(url: str, drafts: bool) -> Server:
    return Server(httpx.Client(base_url=url, timeout=90, trust_env=False), drafts)


def grammar_with_drafts(s: Server) -> None:
    """S/issues/30096, V/issues/53777, S/issues/17576: refused, or the grammar stumbles over rejected drafts."""
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    asked: dict[str, Any] = {"response_format": schema, "max_tokens": 150, "temperature": 0.8}
    answers = [s.ask(say(f"Describe city number {n}."), **asked)["choices"][0] for n in range(4)]
    ended = [follows(answer["message"]["content"], answer["finish_reason"]) for answer in answers]
    assert any(ended), answers


def a_required_tool_is_called_with_drafts(s: Server) -> None:
    """S/issues/30096: tool_choice=required."""
    asked: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": NAMED, "max_tokens": 200, "temperature": 0.8}
    answers = [s.ask(say(f"The weather on day {n}?"), **asked)["choices"][0] for n in range(4)]
    for answer in answers:
        called = [call["function"] for call in answer["message"]["tool_calls"]]
        assert {function["name"] for function in called} == {"weather"}, answer
        if answer["finish_reason"] != "length":
            assert all(isinstance(json.loads(function["arguments"]), dict) for function in called), answer


def logprobs_are_the_targets(s: Server) -> None:
    """Z/issues/39, V/issues/34497: missing, wrong or misaligned. Each equals a score of the same prefix by itself."""
    compared = 0
    for question in ("Why is the sky blue?", "Name three colours.", "What is a prime number?"):
        compared += _scores_compared(s, say(question))
    assert compared >= 4, compared


def _scores_compared(s: Server, messages: Any) -> int:
    """How many tokens' scores were; none where the text does not say which tokens made it."""
    answer = s.ask(messages, max_tokens=24, logprobs=True, top_logprobs=5)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    prompt = s.post("/tokenize", {"model": MODEL_ID, "messages": messages})["tokens"]
    emitted = s.post("/tokenize", {"model": MODEL_ID, "prompt": answer["choices"][0]["message"]["content"]})["tokens"]
    if len(emitted) != len(entries):
        return 0
    places = range(0, len(emitted), 5)
    for at in places:
        body = {"model": MODEL_ID, "prompt": [*prompt, *emitted[:at]], "temperature": 0, "max_tokens": 1, "logprobs": 5}
        alone = s.post("/v1/completions", body)["choices"][0]["logprobs"]
        scores = dict(alone["top_logprobs"][0])
        token = entries[at]["token"]
        assert token in scores, (at, token, scores)
        assert abs(scores[token] - entries[at]["logprob"]) < 0.1, (at, token, scores[token], entries[at]["logprob"])
    return len(places)


def what_trees_cannot_honour_is_refused(s: Server) -> None:
    """S/issues/28179, /28180: repetition_penalty ignored."""
    fields = {"repetition_penalty": 1.2, "seed": 1}
    if s.drafts:
        fields |= {"frequency_penalty": 0.5, "presence_penalty": 0.5}
    for field, value in fields.items():
        error = s.ask(say("hi"), 400, **{"temperature": 0.8, field: value})["error"]
        assert error["param"] == field, (field, error)


def temperature_is_obeyed(s: Server) -> None:
    """Z/issues/74: silently greedy."""
    sampled = {s.text(say("Invent a name."), temperature=1.0, max_tokens=16) for _ in range(6)}
    assert len(sampled) > 2, sampled
    greedy = {s.text(say("Invent a name."), max_tokens=16) for _ in range(3)}
    assert len(greedy) == 1, greedy


def nothing_is_past_a_stop(s: Server) -> None:
    """S/pull/23802, V/pull/47616: a stop in the middle of an accepted block; lists trimmed alike."""
    whole = s.text(say(LONG), max_tokens=80)
    for at in range(10, min(len(whole), 200), 37):
        stop = whole[at : at + 4]
        if not stop.strip():
            continue
        answer = s.ask(say(LONG), max_tokens=80, stop=[stop], logprobs=True)
        choice = answer["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)], (stop, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


def limits_are_exact(s: Server) -> None:
    """S/issues/39826, /37450, /31599: more tokens than max_tokens; a stop behind the cap."""
    whole = s.text(say(LONG), max_tokens=64, ignore_eos=True)
    for limit in (1, 2, 5, 31, 32, 33, 63, 64):
        answer = s.ask(say(LONG), max_tokens=limit, ignore_eos=True)
        choice, used = answer["choices"][0], answer["usage"]
        assert (used["completion_tokens"], choice["finish_reason"]) == (limit, "length"), (limit, used)
        assert whole.startswith(choice["message"]["content"].rstrip("\ufffd")), limit


def an_answer_ends_at_its_end_token(s: Server) -> None:
    """S/issues/31599: the cap and the end in one block."""
    messages = say("Answer with one word: what is the capital of France?")
    whole = s.ask(messages, max_tokens=200)
    tokens = whole["usage"]["completion_tokens"]
    assert whole["choices"][0]["finish_reason"] == "stop", whole
    for limit in (tokens, tokens + 1, tokens + 3):
        answer = s.ask(messages, max_tokens=limit)
        assert answer["choices"][0]["message"] == whole["choices"][0]["message"], limit
        assert answer["choices"][0]["finish_reason"] == "stop", limit


def characters_are_whole_in_streams(s: Server) -> None:
    """github.com/ai-dynamo/dynamo/pull/12688: U+FFFD where a character is split over chunks."""
    emoji = "\U0001f30d\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467"
    messages = say(f"Repeat exactly: {emoji} \u65e5\u672c\u8a9e \u00e9\u00e8")
    for limit in (40, 41, 42, 43):
        whole = s.text(messages, max_tokens=limit)
        assert s.stream(messages, max_tokens=limit) == whole


def a_reader_who_leaves_frees_its_slot(s: Server) -> None:
    """S/issues/36333, /37833: the engine goes on for nobody."""
    body = {"model": MODEL_ID, "messages": say(LONG), "stream": True, "max_tokens": 1500, "ignore_eos": True}
    before = s.page()
    for _ in range(4):
        with s.http.stream("POST", CHAT, json=body) as answer:
            for count, _line in enumerate(answer.iter_lines()):
                if count > 4:
                    break
    _aborted(s, before, 4)


def _aborted(s: Server, before: Page, count: int) -> None:
    """Of the requests since `before` so many have ended so, and none runs."""
    end = time.monotonic() + 10
    while True:
        page = s.page()
        ended = growth(before, page, "ddtree_requests_total", "outcome").get("abort", 0.0)
        held = total(page, "ddtree_running_requests")
        if ended == count and not held:
            return
        assert time.monotonic() < end, f"{ended} of {count} were aborted, {held} still run"
        time.sleep(0.2)


def a_prompt_may_reach_the_contexts_end(s: Server) -> None:
    """S/pull/29450, V/issues/55279: masks out of bounds."""
    context = s.http.get("/v1/models").json()["data"][0]["max_model_len"]
    for room in (40, 34, 33, 12, 5):
        body = {"model": MODEL_ID, "prompt": [100 + n % 1000 for n in range(context - room)], "temperature": 0}
        answer = s.post("/v1/completions", {**body, "max_tokens": room, "ignore_eos": True})
        assert answer["choices"][0]["finish_reason"] == "length", (room, answer["choices"][0])
        assert answer["usage"]["completion_tokens"] == room, (room, answer["usage"])


def a_shared_prefix_is_cached_and_changes_nothing(s: Server) -> None:
    """V/pull/42971, Z/issues/165: corrupted, or never hit."""
    system = {"role": "system", "content": "You are a patient teacher. " * 40}
    messages = [system, *say("What is a prime number?")]
    first = s.ask(messages, max_tokens=40)
    again = s.ask(messages, max_tokens=40)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, again["usage"]
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def acceptance_is_counted_from_what_was_delivered(s: Server) -> None:
    """S/issues/11441, /11144: acceptance that counts undelivered tokens, or resets."""
    if not s.drafts:
        return
    before = s.page()
    answers = [s.ask(say(f"{LONG} Chapter {n}."), max_tokens=50, ignore_eos=True) for n in range(4)]
    delivered = sum(answer["usage"]["completion_tokens"] - 1 for answer in answers)
    end = time.monotonic() + 10
    while True:  # the last step is counted after its tokens left
        after = s.page()
        sums = total(after, "ddtree_acceptance_length_sum") - total(before, "ddtree_acceptance_length_sum")
        steps = total(after, "ddtree_acceptance_length_count") - total(before, "ddtree_acceptance_length_count")
        # The watchdog may generate a few tokens of its own meanwhile.
        if steps and delivered <= sums <= delivered + 8:
            break
        assert time.monotonic() < end, (sums, delivered, steps)
        time.sleep(0.3)
    assert sums / steps > 1.2, sums / steps


def a_deadline_is_kept(s: Server) -> None:
    """A client's own time limit ends the engine's work too, and the official client does not repeat it."""
    body = {"model": MODEL_ID, "messages": say(LONG), "max_tokens": 1900, "ignore_eos": True}
    before = s.page()
    answer = s.http.post(CHAT, json=body, headers={"x-request-timeout-seconds": "0.2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded"), answer.text[:200]
    assert answer.headers["x-should-retry"] == "false"
    _aborted(s, before, 1)


def an_invalid_body_gets_its_status(s: Server) -> None:
    """What must be refused, from load_tests.chaos; then it still answers."""
    for body, kind, status in invalid_bodies(MODEL_ID):
        try:
            answer = s.http.post(CHAT, content=body, headers={"content-type": kind})
        except httpx.WriteError:
            assert status == 413
            continue
        assert answer.status_code == status, (body[:60], answer.status_code, status, answer.text[:200])
    assert s.text(say("Hi"), max_tokens=4)


CASES: dict[str, Callable[[Server], None]] = {
    case.__name__: case
    for case in (
        grammar_with_drafts, a_required_tool_is_called_with_drafts, logprobs_are_the_targets,
        what_trees_cannot_honour_is_refused, temperature_is_obeyed, nothing_is_past_a_stop, limits_are_exact,
        an_answer_ends_at_its_end_token, characters_are_whole_in_streams, a_reader_who_leaves_frees_its_slot,
        a_prompt_may_reach_the_contexts_end, a_shared_prefix_is_cached_and_changes_nothing,
        acceptance_is_counted_from_what_was_delivered, a_deadline_is_kept, an_invalid_body_gets_its_status,
    )
}  # fmt: skip
