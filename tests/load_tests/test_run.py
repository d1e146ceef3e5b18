"""The command line against a server whose timings and faults are known. Locust patches the standard library, so every
run is a process of its own."""

import csv
import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="needs the extra `load`"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def truth() -> Iterator[Callable[..., str]]:
    """`truth(*arguments)` starts a truth server and returns its address."""
    children = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-m", "tests.load_tests.truth", *arguments]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        return f"http://127.0.0.1:{int(child.stdout.readline())}"

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def start(url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "load_tests", "run", "--url", url, "--quiet", "--out", str(tmp_path)]
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
        )
        file = tmp_path / "report.json"
        assert file.exists() or done.returncode == 2, done.stderr
        return done.returncode, json.loads(file.read_text()) if file.exists() else {"stderr": done.stderr}

    return start


def test_every_fault_is_a_failure_of_its_kind(truth: Callable[..., str], run: Run) -> None:
    words = "ok,cut,no_done,no_usage,empty,error_frame,refuse,garbage,hang"
    url = truth("--script", words, "--chunks", "4", "--ttft", "0.01", "--gap", "0.01")
    code, report = run(url, "--mix", "fixed", "--users", "3", "--requests", "18", "--timeout", "8")
    kinds = ("cut", "no_done", "no_usage", "empty", "error_frame:engine_error", "bad_event", "timeout")
    assert report["summary"]["failures"] == dict.fromkeys((*kinds, "status_503:overloaded"), 2)
    assert report["summary"]["completed"] == 2
    assert code == 1


def test_faults_of_whole_answers_too(truth: Callable[..., str], run: Run) -> None:
    url = truth("--script", "ok,no_usage,empty,refuse,not_json", "--chunks", "2")
    _, report = run(url, "--mix", "whole", "--users", "1", "--requests", "5")
    expected = dict.fromkeys(("no_usage", "empty", "status_503:overloaded", "bad_body"), 1)
    assert report["summary"]["failures"] == expected


def test_a_user_who_was_refused_waits_as_long_as_the_server_asked(truth: Callable[..., str], run: Run) -> None:
    url = truth("--script", "busy,ok", "--chunks", "2")
    _, report = run(url, "--mix", "fixed", "--users", "1", "--requests", "4")
    assert report["summary"]["failures"] == {"status_503:overloaded": 2} and report["summary"]["completed"] == 2
    with urllib.request.urlopen(f"{url}/truth") as answer:
        told = json.load(answer)
    refused, answered = ([one["arrived"] for one in told.values() if one["word"] == word] for word in ("busy", "ok"))
    assert all(later - earlier > 0.9 for earlier, later in zip(refused, answered, strict=True))


def test_the_end_of_a_run_waits_for_nobody_who_was_refused(truth: Callable[..., str], run: Run) -> None:
    url = truth("--script", "later")
    _, report = run(url, "--mix", "fixed", "--users", "2", "--duration", "2", "--drain", "3600")
    assert report["summary"]["failures"] == {"status_503:overloaded": 2}


def test_measured_counts_and_times_are_the_servers(truth: Callable[..., str], run: Run, tmp_path: Path) -> None:
    url = truth("--chunks", "8", "--per-chunk", "3", "--ttft", "0.05", "--gap", "0.02")
    code, report = run(url, "--mix", "fixed", "--users", "4", "--requests", "20")
    with urllib.request.urlopen(f"{url}/truth") as answer:
        told = json.load(answer)
    rows = list(csv.DictReader((tmp_path / "requests.csv").read_text().splitlines()))
    assert code == 0
    assert sorted(row["request_id"] for row in rows) == sorted(told)
    assert all(row["frames"] == "8" and row["completion_tokens"] == "22" for row in rows)
    assert report["summary"]["acceptance"] == 3
    # Nothing is read before it was sent; how long after is a benchmark's business.
    for row in rows:
        times = told[row["request_id"]]["times"]
        assert times[0] <= float(row["ttft_s"]) + 1e-3
        assert times[-1] <= float(row["ttft_s"]) + float(row["tpot_s"]) * 21 + 1e-3


def test_what_is_still_open_at_the_end_is_a_failure(truth: Callable[..., str], run: Run) -> None:
    url = truth("--script", "hang", "--chunks", "4", "--gap", "0.01")
    code, report = run(url, "--mix", "fixed", "--users", "2", "--duration", "4", "--drain", "1", "--timeout", "100")
    assert report["summary"]["failures"] == {"unfinished": 2}
    assert code == 1


def test_conversations_and_readers_who_leave(truth: Callable[..., str], run: Run) -> None:
    url = truth("--chunks", "8", "--gap", "0.01")
    code, report = run(url, "--mix", "multi_turn=1,abandon=1", "--users", "4", "--requests", "16", "--scale", "0.5")
    groups = report["workloads"]
    assert groups["abandon"]["abandoned"] == groups["abandon"]["requests"] > 0
    assert groups["multi_turn"]["completed"] == groups["multi_turn"]["requests"]
    assert groups["abandon"]["requests"] + groups["multi_turn"]["requests"] > 16
    assert code == 0


def test_an_open_loop_does_not_wait_for_answers(truth: Callable[..., str], run: Run) -> None:
    url = truth("--chunks", "2", "--ttft", "1.5", "--gap", "0.01")
    arguments = ("--shape", "poisson", "--rate", "20", "--duration", "2", "--mix", "chat")
    _, report = run(url, *arguments)
    # A closed loop of any fixed number of users would have been held up by 1.5 s for every answer.
    assert report["summary"]["completed"] > 20
    assert report["summary"]["mean_in_flight"] > 8


def test_steps_are_reported_with_a_knee_and_pictures(truth: Callable[..., str], run: Run, tmp_path: Path) -> None:
    url = truth("--chunks", "3", "--gap", "0.01")
    shape = ("--shape", "steps", "--users", "4", "--step-users", "2", "--step", "2", "--duration", "4")
    _, report = run(url, *shape, "--mix", "chat")
    assert [row["users"] for row in report["levels"]] == [2, 4]
    assert report["knee"] in (2, 4)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "src=" not in page and "<link" not in page and "@import" not in page


def test_the_terminal_shows_four_digits_and_what_was_not_measured(truth: Callable[..., str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "load_tests", "run", "--url", truth("--chunks", "3"), "--quiet", "--mix", "fixed"]
    more = ["--requests", "2", "--slo", "nonsense<=1", "--out", str(tmp_path)]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    said = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("output_tok_per_s", "accept")))
    assert set(said) == {"output_tok_per_s", "acceptance"} and all(len(number) <= 5 for number in said.values())
    assert "BROKEN nonsense<=1 (is not measured)" in done.stdout


def test_a_broken_gate_is_the_exit_code(truth: Callable[..., str], run: Run) -> None:
    url = truth("--chunks", "2")
    code, report = run(url, "--mix", "fixed", "--requests", "2", "--slo", "ttft_s.p50<=0.0001")
    assert code == 1
    assert Counter(verdict["holds"] for verdict in report["slo"]) == {False: 1, True: 1}


def test_a_server_with_keys_is_loaded_with_the_key(truth: Callable[..., str], run: Run) -> None:
    url = truth("--key", "sk-1", "--chunks", "2")
    code, report = run(url, "--start", "--mix", "fixed", "--users", "1", "--requests", "2", "--api-key", "sk-1")
    assert code == 0 and report["config"]["url"] == url
    assert (report["facts"]["model"], report["summary"]["completed"]) == ("truth", 2)
    assert "sk-1" not in json.dumps(report)


@pytest.mark.parametrize(
    ("given", "says"), [((), "401: give --api-key"), (("--api-key", "sk-2"), "does not know the key")]
)
def test_a_server_with_keys_says_which_is_missing(
    truth: Callable[..., str], run: Run, given: tuple[str, ...], says: str
) -> None:
    """Nor is another one started in its place."""
    code, said = run(truth("--key", "sk-1"), "--start", *given)
    assert code == 2 and says in said["stderr"] and "starting one" not in said["stderr"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "http://10.1.2.3"),
        ("--url", "http://127.0.0.1:9"),
        ("--slo", "x"),
        ("--mix", "x"),
        ("--duration", "9e9"),
    ],
)
def test_what_cannot_be_tested_is_said(run: Run, arguments: tuple[str, ...]) -> None:
    code, said = run("http://127.0.0.1:9", *arguments)
    assert code == 2 and said["stderr"].startswith("error: ")
