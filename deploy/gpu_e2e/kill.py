"""A replica dies in the middle of its streams: what clients read must be what they would have read without it.

What this module does not do: start the application; it needs one with two engine replicas.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import psutil

from deploy.gpu_e2e.settings import MODEL_ID
from load_tests.processes import engines
from load_tests.scrape import by_label, parse
from load_tests.target import get, get_json

HEAL_S = 100.0


class Reader(threading.Thread):
    """One greedy stream, read in a thread. `chunks`: with text, so far; `problem`: why it is no whole answer."""

    def __init__(self, url: str, question: str, tokens: int, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self.text, self.chunks, self.problem = "", 0, "not begun"
        self.tokens: int | None = None
        self._url, self._timeout = f"{url}/v1/chat/completions", timeout_s
        self._body = {
            "model": MODEL_ID, "messages": [{"role": "user", "content": question}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=self._timeout, trust_env=False) as answer:
                self.problem = f"status {answer.status_code}" if answer.status_code != 200 else "cut"
                for line in answer.iter_lines():
                    self._line(line)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _line(self, line: str) -> None:
        if line == "data: [DONE]" and self.problem == "cut":
            self.problem = ""
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.problem = f"error frame {event['error'].get('code')}"
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                self.text += text
                self.chunks += 1


def read_all(readers: Sequence[Reader], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    for reader in readers:
        reader.join(max(0.0, end - time.monotonic()))


def resumes(url: str) -> dict[str, float]:
    """Answers that lost their replica so far, by what became of them."""
    return by_label(parse((get(f"{url}/metrics") or b"").decode()), "gateway_resumes_total", "outcome")


def run(url: str, root: int, questions: Sequence[str], tokens: int, left_s: float, found: dict[str, Any]) -> None:
    """Read every question undisturbed, twice, then again while the oldest engine below process `root` is killed.

    Fills `found` for the report as it goes: `identical` of `streams` texts; `identical_undisturbed`, how many were the
    same the second time, since batches differ in shape and near-ties fall anew; `resumed` answers; `problems`;
    `differing`; and `healed_s`, the seconds until there were as many engines again (None where the time did not
    suffice).
    """
    end = time.monotonic() + left_s
    serving = wait_for_two(url, left_s / 2)
    where = placed(root)
    before, control = (undisturbed(url, questions, tokens, end - time.monotonic()) for _ in range(2))
    counted, living = resumes(url), engines(root)
    during = [Reader(url, question, tokens, left_s) for question in questions]
    while time.monotonic() < end and not all(reader.chunks >= 3 or not reader.is_alive() for reader in during):
        time.sleep(0.005)
    progress = [reader.chunks for reader in during]
    os.kill(living[0], signal.SIGKILL)
    killed = time.monotonic()
    read_all(during, max(1.0, end - time.monotonic()))
    texts = [(one.text, other.text) for one, other in zip(before, during, strict=True)]
    found |= {
        "placed": where,
        "streams": len(during),
        "identical": sum(one == other for one, other in texts),
        "identical_undisturbed": sum(a.text == b.text for a, b in zip(before, control, strict=True)),
        "problems": [reader.problem for reader in during if reader.problem],
        "chunks_before_the_kill": progress,
        "whole_usage": all(reader.tokens == tokens for reader in during),
        "resumed": {name: n - counted.get(name, 0) for name, n in resumes(url).items()},
        "differing": [
            parting(url, question, one, other)
            for question, (one, other) in zip(questions, texts, strict=True)
            if one != other
        ],
        "last_answer_after_s": round(time.monotonic() - killed, 2),
        "healed_s": None,
    }
    while time.monotonic() < min(end, killed + HEAL_S):
        now = exporting(url)
        if len(now) >= len(serving) and now != serving:
            found["healed_s"] = round(time.monotonic() - killed, 1)
            break
        time.sleep(0.5)


def wait_for_two(url: str, timeout_s: float) -> set[str]:
    """Names of the replicas that serve. Raises RuntimeError when they are not two in time."""
    end = time.monotonic() + timeout_s
    while len(serving := exporting(url)) < 2:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(serving)} engine replicas serve, two are needed")
        time.sleep(0.5)
    return serving


def placed(root: int) -> list[dict[str, Any]]:
    """Each engine replica's process, its node's (the raylet above it), and the GPUs that its scheduler sees."""
    found = []
    for pid in engines(root):
        try:
            process = psutil.Process(pid)
            seen = {child.environ().get("CUDA_VISIBLE_DEVICES") for child in process.children()}
            node = next((parent.pid for parent in process.parents() if parent.name() == "raylet"), None)
            found.append({"pid": pid, "node": node, "gpus": sorted(seen - {None})})
        except psutil.Error as error:
            found.append({"pid": pid, "unknown": str(error)})
    return found


def exporting(url: str) -> set[str]:
    """Names of the engine replicas that run: they announce themselves once their engine has started."""
    groups = [group["labels"] for group in get_json(f"{url}/-/prometheus/targets") or ()]
    return {labels["replica"] for labels in groups if labels["deployment"] == "engine"}


def undisturbed(url: str, questions: Sequence[str], tokens: int, left_s: float) -> list[Reader]:
    """Every question's stream, read to its end. Raises RuntimeError where one is not whole."""
    readers = [Reader(url, question, tokens, left_s) for question in questions]
    read_all(readers, left_s)
    if wrong := [reader.problem for reader in readers if reader.problem]:
        raise RuntimeError(f"undisturbed streams failed: {wrong[:3]}")
    return readers


def parting(url: str, question: str, one: str, other: str) -> dict[str, Any]:
    """Where two answers part, and how undecided the model is there: `gap` is the log-probability of one's next token
    less that of the other's; a near-tie has next to none."""
    found: dict[str, Any] = first_difference(one, other)
    try:
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as http:
            found["gap"] = _gap(http, question, one, other)
    except Exception as error:
        found["gap"] = f"{type(error).__name__}: {error}"
    return found


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> dict[str, Any]:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return {"at": at, "undisturbed": one[at : at + 40], "disturbed": other[at : at + 40]}


def _gap(http: httpx.Client, question: str, one: str, other: str) -> float | None:
    def post(path: str, **body: Any) -> Any:
        return http.post(path, json={"model": MODEL_ID, **body}).raise_for_status().json()

    prompt = post("/tokenize", messages=[{"role": "user", "content": question}])["tokens"]
    texts = [post("/tokenize", prompt=text)["tokens"] for text in (one, other)]
    at = first_difference(*texts)["at"]
    asked = {"prompt": [*prompt, *texts[0][:at]], "max_tokens": 1, "temperature": 0, "logprobs": 5}
    scores = post("/v1/completions", **asked)["choices"][0]["logprobs"]["top_logprobs"][0]
    names = [post("/detokenize", tokens=[tokens[at]])["prompt"] for tokens in texts if at < len(tokens)]
    values = [scores.get(name) for name in names]
    return None if len(values) < 2 or None in values else round(values[0] - values[1], 4)
