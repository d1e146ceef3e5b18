"""What SGLang does to its process is bounded: signals, environment, loggers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serve_app.engines.sglang.process import clean_start, metrics_directory
from serve_app.multiprocess import ENV_DIRECTORY
from tests.conftest import ROOT

PROGRAM = """
import os, signal, sys, threading
from serve_app.engines.sglang.process import ignore_sigquit

def elsewhere():
    with ignore_sigquit():
        os.kill(os.getpid(), signal.SIGQUIT)
        print("alive", flush=True)

signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # whatever was inherited
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGQUIT)
print("not reached", flush=True)
"""


def test_sigquit_does_nothing_while_it_is_ignored_and_kills_again_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGQUIT)


def test_the_metrics_directory_is_its_own_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_DIRECTORY, "/of/all/replicas")
    with metrics_directory({"X_OF_SGLANG": "1"}):
        mine = Path(os.environ[ENV_DIRECTORY])
        assert mine.is_dir() and os.environ["X_OF_SGLANG"] == "1"
    assert not mine.exists() and os.environ[ENV_DIRECTORY] == "/of/all/replicas" and "X_OF_SGLANG" not in os.environ


def test_loggers_and_loops_are_as_before() -> None:
    root, policy = logging.getLogger(), asyncio.get_event_loop_policy()
    before = list(root.handlers), root.level
    with clean_start():
        logging.basicConfig(level=logging.CRITICAL, force=True)
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    assert (list(root.handlers), root.level) == before and asyncio.get_event_loop_policy() is policy
    assert threading.current_thread() is threading.main_thread()
