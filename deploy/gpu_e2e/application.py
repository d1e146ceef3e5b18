"""One phase's application: a Ray cluster of its own, and `python -m serve_app.launch` in it, as users start it.

What this module does not do: ask it anything beyond whether it is ready.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from load_tests.target import free_port, get
from serve_app import proxy
from serve_app.config import load_config
from serve_app.launch import SERVE_SWITCHES

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {
    # One mode for every process, or those started later are refused.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    "RAY_COLOR_PREFIX": "0",
    # Memory that a virtual machine is given as it is used looks full at all times.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_register_timeout_seconds": "150",
    "NO_PROXY": "*",
    "PYTHONUNBUFFERED": "1",
    **SERVE_SWITCHES,
}


class NotStarted(RuntimeError):
    """The application did not become ready; the message ends with its log's end."""


class Application:
    """Starts at once, in the background.

    Args:
        name: of its logs. tree: its configuration. nodes: of its cluster, see `cluster`. logs: folder of its logs.

    Attributes:
        url: its address, without a trailing slash. start_s: seconds until it was ready, once it is.
        in_front: what takes the connections, for the report.
    """

    def __init__(self, name: str, tree: dict[str, Any], nodes: list[dict[str, Any]], logs: Path) -> None:
        self.name, self.start_s = name, 0.0
        self._began = time.monotonic()
        # Short: paths of unix sockets are limited to about 100 characters.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="e2e-", dir="/tmp"))
        self._logs = {part: logs / f"{name}-{part}.log" for part in ("cluster", "launch")}
        self._config = self.temp_dir / "config.yaml"
        self._config.write_text(yaml.safe_dump(tree))
        self.url = f"http://127.0.0.1:{free_port()}"
        # Several nodes on one machine would give their HAProxies the same ports.
        choice = proxy.choose("auto" if len(nodes) == 1 else "serve", os.environ)
        self.in_front = choice.why.partition(" in ")[0] if choice.binary else f"Serve's proxy, {choice.why}"
        self._environment = {
            **os.environ, **ENVIRONMENT, "DDTREE_CONFIG": str(self._config),
            **proxy.switches(choice, load_config(tree, use_env=False).ingress.request_timeout_s),
        }  # fmt: skip
        if choice.binary:
            places = self.temp_dir / "hp"
            places.mkdir(mode=0o700)
            self._environment |= proxy.local_switches(str(places), "127.0.0.1")
        spec = json.dumps({"directory": str(self.temp_dir), "nodes": nodes})
        self._cluster = self._spawn("cluster", ["deploy.gpu_e2e.cluster", spec])
        self._launch: subprocess.Popen[str] | None = None
        self._failure: str | None = None
        self._closing = threading.Event()
        self._seen: dict[int, psutil.Process] = {}
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _spawn(self, part: str, module: list[str], **environment: str) -> subprocess.Popen[str]:
        pipes = part == "cluster"
        with self._logs[part].open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *module], cwd=ROOT, text=True, start_new_session=True, stderr=log,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL, stdout=subprocess.PIPE if pipes else log,
                env={**self._environment, **environment},
            )  # fmt: skip

    def _start(self) -> None:
        """On a thread: the launcher needs the cluster's address."""
        assert self._cluster.stdout is not None
        try:
            line = self._cluster.stdout.readline()
            if not line:
                raise NotStarted("the Ray cluster did not start")
            if self._closing.is_set():
                return
            port = self.url.rpartition(":")[2]
            self._launch = self._spawn(
                "launch", ["serve_app.launch", "--port", port], RAY_ADDRESS=json.loads(line)["address"]
            )
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    @property
    def pid(self) -> int:
        """Above every process of the cluster, the replicas' included."""
        return self._cluster.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Raises NotStarted, when it ended or is not ready in time. Once it was, returns at once."""
        end = time.monotonic() + timeout_s
        if self.start_s:
            return
        while get(f"{self.url}/ready", 10) is None:
            late = time.monotonic() > end
            ended = self._launch is not None and self._launch.poll() is not None
            down = self._cluster.poll() is not None
            if self._failure or late or ended or down:
                why = self._failure or ("not ready in time" if late else "its process ended")
                raise NotStarted(f"{self.name}: {why}\n{self.log_end()}")
            self._note_processes()
            time.sleep(0.5)
        self.start_s = round(time.monotonic() - self._began, 1)
        self._note_processes()

    def log_end(self, characters: int = 3000) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-characters:] for path in self._logs.values() if path.exists()
        )

    def _note_processes(self) -> None:
        for parent in (self._cluster, self._launch):
            if parent is None:
                continue
            try:
                for process in psutil.Process(parent.pid).children(recursive=True):
                    self._seen.setdefault(process.pid, process)
            except psutil.Error:
                continue

    def close(self, timeout_s: float = 20.0) -> None:
        """End the launcher, the cluster, and whatever of theirs is left, by process id."""
        self._closing.set()
        self._note_processes()
        end = time.monotonic() + timeout_s
        if self._launch is not None:
            _end(self._launch, end - timeout_s / 2 - time.monotonic())
        if self._cluster.stdin is not None:
            self._cluster.stdin.close()
        try:
            self._cluster.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(self._cluster, 2)
        for process in self._seen.values():
            try:
                process.kill()  # compares the time of its start: an id that was given anew is left alone
            except psutil.Error:
                continue

    def keep_logs(self, folder: Path, limit: int = 1_500_000) -> None:
        """The ends of Ray's and the replicas' own logs, among them all that SGLang's processes printed."""
        for session in (self.temp_dir / "ray").glob("session_2*"):
            for path in (*session.glob("logs/worker-*.err"), *session.glob("logs/serve/*.log")):
                try:
                    text = path.read_bytes()[-limit:]
                except OSError:
                    continue
                if text.strip():
                    (folder / f"{self.name}-{path.name}").write_bytes(text)


def _end(process: subprocess.Popen[str], timeout_s: float) -> None:
    """Twice SIGTERM: the first drains, the second does not wait."""
    for number, wait in ((signal.SIGTERM, timeout_s / 2), (signal.SIGTERM, timeout_s / 2), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(max(0.5, wait))
        except subprocess.TimeoutExpired:
            continue
