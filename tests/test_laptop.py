"""The laptop application as `make serve` runs it: the real model through Serve, HTTP and the official client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from serve_app import proxy
from tests.conftest import METRICS, RAY_STARTS, SOON_S, Served, eventually, free_port, metric

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
MODEL = "smollm2-135m"
START_S = 180


@pytest.fixture(scope="module")
def served(serve_app_factory: Callable[..., Served]) -> Served:
    # float32: identical whatever shares the batch. The launcher's test runs the default, bfloat16 where there is one.
    config = {
        "model": {"dtype": "float32"},
        "replica": {"num_cpus": 0.1},
        "metrics": METRICS,
    }
    return serve_app_factory("laptop", config)


def idle(served: Served, seconds: float = SOON_S) -> None:
    eventually(lambda: metric(served, "ddtree_running_requests") == 0, seconds)


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_it_answers_a_question(official: openai.OpenAI) -> None:
    question = user("How many days are in a week?")
    answer = official.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=32)
    assert "7" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_metrics_add_up_to_the_tokens_delivered(served: Served, official: openai.OpenAI) -> None:
    names = [
        "ddtree_acceptance_length_sum", "ddtree_accepted_tokens_total", "ddtree_bonus_tokens_total",
        "ddtree_verify_steps_total", "ddtree_acceptance_length_count",
    ]  # fmt: skip
    prefill = {"phase": "prefill"}
    idle(served)
    before = {name: metric(served, name) for name in names}
    first_before = metric(served, "ddtree_emitted_tokens_total", **prefill)
    delivered = 0
    for text in ("Name three colours.", "Write a haiku about rain.", "Count from one to twenty."):
        answer = official.chat.completions.create(model=MODEL, messages=user(text), temperature=0, max_tokens=60)
        assert answer.usage is not None
        delivered += answer.usage.completion_tokens
    grown = {name: metric(served, name) - before[name] for name in names}
    firsts = metric(served, "ddtree_emitted_tokens_total", **prefill) - first_before
    # Health probes generate one token each, in their prefill, and touch no verify series.
    assert firsts >= 3
    assert grown["ddtree_acceptance_length_sum"] == delivered - 3
    assert grown["ddtree_accepted_tokens_total"] + grown["ddtree_bonus_tokens_total"] == delivered - 3
    assert grown["ddtree_acceptance_length_count"] == grown["ddtree_verify_steps_total"]
    # Drafts are accepted at all: fewer steps than tokens.
    assert grown["ddtree_verify_steps_total"] < 0.8 * (delivered - 3)


def test_every_forward_without_a_gpu_is_a_counted_fallback(served: Served, official: openai.OpenAI) -> None:
    def fallbacks(role: str) -> float:
        return metric(served, "ddtree_graph_fallbacks_total", role=role, reason="no_cuda")

    idle(served)
    before = fallbacks("target"), fallbacks("draft"), metric(served, "ddtree_verify_steps_total")
    official.chat.completions.create(model=MODEL, messages=user("Hello"), temperature=0, max_tokens=20)
    steps = metric(served, "ddtree_verify_steps_total") - before[2]
    assert fallbacks("draft") - before[1] == steps
    assert fallbacks("target") - before[0] >= steps + 1  # and the prefill
    assert metric(served, "ddtree_graph_replays_total") == 0


def test_a_stream_carries_the_same_text_in_fewer_chunks_than_tokens(official: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": user("Explain gravity to a child."), "temperature": 0, "max_tokens": 80}
    whole = official.chat.completions.create(**body)
    chunks = list(official.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len(chunks) < 80


def test_the_same_seed_gives_the_same_text_and_another_seed_another(official: openai.OpenAI) -> None:
    def text(seed: int) -> str | None:
        answer = official.chat.completions.create(
            model=MODEL, messages=user("Invent a name for a ship."), temperature=1.0, seed=seed, max_tokens=40
        )
        return answer.choices[0].message.content

    assert text(7) == text(7) != text(8)


def test_every_token_has_a_log_probability(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(
        model=MODEL, messages=user("Name a fruit."), temperature=0, max_tokens=24, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None and answer.usage is not None
    assert len(entries) == answer.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    # Greedy: the token is its own best alternative.
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)


def test_a_stop_string_ends_the_text_before_it(official: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": user("Count: one, two, three, four, five."), "temperature": 0, "max_tokens": 60}
    whole = official.chat.completions.create(**body).choices[0].message.content or ""
    stop = whole[len(whole) // 2 :][:4]
    cut = official.chat.completions.create(**body, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_prompt_longer_than_the_context_is_refused_by_name(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        official.chat.completions.create(model=MODEL, messages=user("word " * 20_000), max_tokens=8)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_within_a_second(served: Served, stream: bool) -> None:
    body = {"model": MODEL, "messages": user("Tell a very long story."), "ignore_eos": True, "max_tokens": 4000}
    idle(served)
    with httpx.Client(timeout=60, trust_env=False) as client:
        if stream:
            with client.stream("POST", f"{served.url}/v1/chat/completions", json={**body, "stream": True}) as answer:
                next(answer.iter_lines())
                assert metric(served, "ddtree_running_requests") == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{served.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=1.5))
    # Bounded under what the request would have taken; the second is for people, the rest for a busy machine.
    idle(served, 15)


def test_mixed_requests_at_once_answer_as_alone(served: Served, official: openai.OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = ["What is rain?", "List two birds.", "Why do we sleep?", "Say hello in French.", "What is seven times six?"]

    def ask(text: str) -> str | None:
        answer = official.chat.completions.create(model=MODEL, messages=user(text), temperature=0, max_tokens=24)
        return answer.choices[0].message.content

    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(ask, texts)) == alone


def own_ray() -> dict[str, str]:
    """The environment of a launcher beside the tests' own cluster."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "disabled"}
    environment.pop(proxy.ENABLED, None)
    return environment


@pytest.mark.parametrize("background", [True, False])
def test_the_launcher_serves_from_any_directory_says_so_drains_and_stops(tmp_path: Path, background: bool) -> None:
    port = free_port()
    environment = own_ray()
    # A shell starts its background jobs with SIGINT ignored.
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh"] if background else []
    command += [sys.executable, "-m", "serve_app.launch", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )

    def stop() -> None:
        if background:
            child.send_signal(signal.SIGTERM)
        else:  # a terminal's Ctrl-C reaches every process of the group, Ray's too
            os.killpg(child.pid, signal.SIGINT)

    try:
        deadline = time.monotonic() + START_S
        while "Ready on" not in log.read_text(errors="replace"):
            assert child.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, "never ready"
            time.sleep(0.5)
        body = {"model": MODEL, "messages": user("Hello"), "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.json()["usage"]["completion_tokens"] <= 4
        running = {**body, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", answer.url, json=running, timeout=120, trust_env=False) as stream:
            lines = stream.iter_lines()
            next(lines)
            stop()
            *_, finish, _, done, _ = lines
        assert '"finish_reason":"length"' in finish and done == "data: [DONE]"
        assert child.wait(150) == 0
        name = "the proxy of Serve" if proxy.choose("auto", environment).binary is None else "HAProxy"
        said = log.read_text(errors="replace")
        assert f"In front: {name} (" in said
        assert said.splitlines()[-1] == "Stopped."
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)


# While Ray is imported, and while the engine's constructor runs (or is about to).
@pytest.mark.parametrize("seen", ["In front: ", "name='engine'"])
def test_a_stop_while_the_launcher_starts_is_no_failure(tmp_path: Path, seen: str) -> None:
    command = [sys.executable, "-m", "serve_app.launch", "--port", str(free_port())]
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(command, env=own_ray(), stdout=output, stderr=output)
    try:
        eventually(lambda: seen in log.read_text(errors="replace"), START_S)
        child.send_signal(signal.SIGINT)
        code = child.wait(120)
    finally:
        child.kill()
        child.wait()
    said = log.read_text(errors="replace")
    assert (code, said.splitlines()[-1]) == (0, "Stopped."), said[-3000:]
    assert "KeyboardInterrupt" not in said


def test_a_deployment_that_fails_is_the_launchers_failure_and_its_last_word() -> None:
    command = [sys.executable, "-m", "serve_app.launch", "--port", str(free_port())]
    env = own_ray() | {"DDTREE_MODEL__CONTEXT_LENGTH": "999999", "DDTREE_REPLICA__MAX_CONSTRUCTOR_RETRY_COUNT": "1"}
    for _ in range(RAY_STARTS):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        if "timed out during startup" not in done.stderr:  # Ray's half minute for a node, which a busy machine can miss
            break
    assert done.returncode == 1
    assert re.fullmatch(r"error: deployment engine: .*context_length 999999 exceeds.*", done.stderr.splitlines()[-1])
    assert "Stopped." not in done.stdout


def test_the_launcher_names_a_taken_port(serve_port: int) -> None:
    command = [sys.executable, "-m", "serve_app.launch", "--port", str(serve_port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{serve_port}" in done.stderr
