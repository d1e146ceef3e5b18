"""Does what docs/deploy.md tells, on two machines with systemd, Redis and a firewall; prints what it saw as JSON.

Arguments: a directory that holds `releases/VERSION` (a wheel each), `wheelhouse` (their dependencies), `deploy` (the
checkout's) and `models` (the laptop model's cache). Run by `test_bring_up` through `machines.isolated`. What cannot
be had here: a synchronised clock, GPUs, an index of packages.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.deploy.clients import Clients
from tests.deploy.machines import Machine, bridge

HEAD, NODE = "10.0.0.10", "10.0.0.11"
# Whose addresses the page's firewall knows; the last is nobody's.
BALANCER, PROMETHEUS, STRANGER = "10.0.1.2", "10.0.2.10", "10.9.9.9"
OLD, NEW = "0.1.0", "0.1.1"
METAL = "/opt/ddtree/current/deploy/bare-metal"
DASHBOARD = "--address http://127.0.0.1:8265"
PAGE = (ROOT / "docs" / "deploy.md").read_text()
BODY = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
QUESTION = "Name three colours."
START_S = 240.0


def main() -> None:
    files = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="machines-", dir="/var/tmp", ignore_cleanup_errors=True) as directory:
        bridge("10.0.0.1/24", *(f"{address}/32" for address in (BALANCER, PROMETHEUS, STRANGER)))
        head, node = (
            Machine(name, f"{address}/24", "10.0.0.1", Path(directory), files)
            for name, address in (("head", HEAD), ("node", NODE))
        )
        try:
            print("SEEN " + json.dumps(run(head, node)))
        finally:
            for machine in (head, node):
                machine.stop()


def run(head: Machine, node: Machine) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, step in {
        "installed": lambda: [install(machine, OLD) for machine in (head, node)],
        "configured": lambda: configure(head, node),
        "walled": lambda: firewall(head, node),
        "preflight": lambda: {"head": preflight(head, "head")},
        "started": lambda: start(head, node, seen),
        "answers": lambda: {"key": ask(seen["configured"]), "none": ask(""), "version": version()},
        "doors": doors,
        "guarded": lambda: guarded(head),
        "health": lambda: {address: get(address, 52365, "/api/local_raylet_healthz", HEAD) for address in (HEAD, NODE)},
        "exchanged": lambda: exchanged(head, seen["configured"]),
        "head_lost": lambda: head_lost(head, seen["configured"]),
        "reloaded": lambda: reloaded(head, seen["configured"]),
        "told": lambda: {machine.name: told(machine, seen["configured"]) for machine in (head, node)},
        "upgraded": lambda: switched(head, node, NEW, seen["configured"]),
        "rolled_back": lambda: switched(head, node, OLD, seen["configured"]),
        "stopped": lambda: stopped(head, node),
    }.items():
        began = time.monotonic()
        seen[name] = step()
        print(f"{name}: {time.monotonic() - began:.0f} s: {seen[name]}", file=sys.stderr, flush=True)
    return seen


def install(machine: Machine, release: str) -> str:
    """ "1. Every node"."""
    (wheel,) = (Path(sys.argv[1]) / "releases" / release).glob("*.whl")
    said = machine.run(f"/mnt/deploy/bare-metal/install.sh /mnt/releases/{release}/{wheel.name}", seconds=900,
                       PIP_NO_INDEX="1", PIP_FIND_LINKS="/mnt/wheelhouse", PIP_QUIET="1")  # fmt: skip
    if release == OLD:
        machine.run(f"/opt/ddtree/releases/{release}/deploy/bare-metal/release.sh {release}")
        machine.run("cp -r /mnt/models /var/cache/ddtree/ && chown -R ddtree: /var/cache/ddtree")
    return said.splitlines()[-1]


def configure(head: Machine, node: Machine) -> str:
    """The token, the key and Redis; returns the key."""
    token = head.run("openssl rand -hex 32").strip()
    made = head.run("/opt/ddtree/current/bin/python -m serve_app.admission team-a")
    key = re.search(r"shown only now: (\S+)", made)
    assert key is not None, made
    keys = f"admission:\n  keys:\n    {made.splitlines()[-1]}\n"
    for machine in (head, node):
        machine.run(f"echo {token} | install -o ddtree -m 0400 /dev/stdin /etc/ddtree/ray-token")
        machine.run('printf %s "$KEYS" > /etc/ddtree/keys.yaml', KEYS=keys)
    head.run(block("3. Redis"))
    return key[1]


def block(heading: str) -> str:
    """The page's commands under a heading, for a machine where root runs them and packages are installed already."""
    (section,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (.*)$", section, re.MULTILINE)
    return "\n".join(["set -e", *(line.replace("sudo ", "") for line in lines if "apt-get" not in line)])


def firewall(*machines: Machine) -> list[str]:
    """The rules that are there afterwards, by machine."""
    return [machine.run(block("2. Ports") + "\nnft list table inet ddtree") for machine in machines]


def preflight(machine: Machine, role: str, config: str = "") -> list[str]:
    """Misses, by the page's command."""
    (command,) = re.findall(r"^    sudo (systemd-run (?:.*\\\n)*.*preflight.sh) head", PAGE, re.MULTILINE)
    said = machine.run(f"{command} {role} {config}", check=False)
    assert re.search(r"^\d+ misses", said, re.MULTILINE), said
    return re.findall(r"^miss: (.*)", said, re.MULTILINE)


def start(head: Machine, node: Machine, seen: dict[str, Any]) -> dict[str, Any]:
    """ "4. Check, then start"."""
    head.run("systemctl enable --now ddtree-ray-head 2>&1")
    until(lambda: get(HEAD, 52365, "/api/local_raylet_healthz", HEAD)[0] == 200, START_S)
    seen["preflight"]["node"] = preflight(node, "worker", "/opt/ddtree/current/deploy/serve/cpu-node.yaml")
    node.run("systemctl enable --now ddtree-ray-worker 2>&1")
    head.run("install -o ddtree -m 0640 /opt/ddtree/current/deploy/serve/cpu-node.yaml /etc/ddtree/serve.yaml")
    head.run("systemctl enable --now ddtree-serve 2>&1")
    return {"ready": until(ready, START_S), "status": status(head)}


def status(head: Machine) -> str:
    command = f"cd /; set -a; . /etc/ddtree/ray.env; /opt/ddtree/current/bin/serve status {DASHBOARD}"
    said = head.run(f"runuser -u ddtree -- bash -c '{command}'", check=False)
    found = re.search(r"default:\n\s+status: (\w+)", said)
    return found[1] if found else said[-2000:]


def ask(key: str, said: str = "Hi", **fields: Any) -> tuple[int, str]:
    headers = ("-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json", "-m", "80")
    body = {**BODY, "messages": [{"role": "user", "content": said}], **fields}
    return get(NODE, 8000, "/v1/chat/completions", BALANCER, *headers, "-d", json.dumps(body))


def version() -> str:
    return str(json.loads(get(NODE, 8000, "/version", BALANCER)[1])["version"])


def ready() -> bool:
    return get(NODE, 8000, "/ready", BALANCER, "-m", "60")[0] == 200


def doors() -> dict[str, int]:
    """What each side gets through the firewall: an HTTP status, 0 where nothing answers."""
    asked = {
        "balancer to service": (NODE, 8000, "/ready", BALANCER),
        "Prometheus to service": (NODE, 8000, "/metrics", PROMETHEUS),
        "Prometheus to Ray's metrics": (NODE, 8080, "/metrics", PROMETHEUS),
        "Prometheus to an exporter": (NODE, 9464, "/metrics", PROMETHEUS),
        "balancer to Ray's metrics": (NODE, 8080, "/metrics", BALANCER),
        "balancer to the dashboard": (HEAD, 8265, "/", BALANCER),
        "balancer to an agent": (NODE, 52365, "/api/local_raylet_healthz", BALANCER),
        "stranger to service": (NODE, 8000, "/ready", STRANGER),
    }
    return {name: get(host, port, path, source)[0] for name, (host, port, path, source) in asked.items()}


def head_lost(head: Machine, key: str) -> dict[str, Any]:
    """The head's Ray is killed; the node answers meanwhile, and systemd brings the head back."""
    head.run("systemctl kill --signal=KILL ddtree-ray-head")
    meanwhile = [ask(key)[0] for _ in range(5)]
    back = until(lambda: get(HEAD, 52365, "/api/local_raylet_healthz", HEAD)[0] == 200, START_S)
    known = until(lambda: status(head) == "RUNNING", START_S)
    return {"meanwhile": meanwhile, "back": back, "known": known, "afterwards": ask(key)[0]}


def guarded(head: Machine) -> dict[str, Any]:
    """What the head's own users get without the token, with another, and with it: of deployments, of the cluster."""
    found = {}
    for name, token in {"none": "", "other": "0" * 64, "token": "$(cat /etc/ddtree/ray-token)"}.items():
        code = head.run(
            f"""curl -s -m 30 -o /dev/null -w '%{{http_code}}' -H "Authorization: Bearer {token}" \
          http://127.0.0.1:8265/api/serve/applications/""",
            check=False,
        )
        said = head.run(
            f"""cd /; set -a; . /etc/ddtree/ray.env; unset RAY_AUTH_TOKEN_PATH; RAY_AUTH_TOKEN="{token}"
          runuser -u ddtree -- timeout 60 /opt/ddtree/current/bin/ray status --address {HEAD}:6379""",
            check=False,
        )
        found[name] = [int(code), "Node status" in said]
    return found


def exchanged(head: Machine, key: str) -> dict[str, Any]:
    """ "Kimi on every node", but for Kimi: the application ends, and what is deployed next comes up."""
    serve_shutdown(head)
    gone = get(NODE, 8000, "/ready", BALANCER)[0]
    head.run("systemctl reload ddtree-serve")
    return {"gone": gone != 200, "ready": until(ready, START_S), "answer": ask(key)[0]}


def reloaded(head: Machine, key: str) -> dict[str, Any]:
    """ "Configuration": a file that is refused, one that is taken, and the first again."""
    good = head.run("cat /etc/ddtree/serve.yaml")
    long = " Hi" * 500
    with Clients(partial(ask, key), QUESTION) as clients:
        refused = deploy(head, good, 1, lambda: status(head) == "DEPLOY_FAILED")
        meanwhile = ask(key)[0]
        changed = deploy(head, good, 1024, lambda: ask(key, long)[0] == 413)
        running = until(lambda: status(head) == "RUNNING", START_S)
        back = deploy(head, good, None, lambda: ask(key, long)[0] == 200)
        running &= until(lambda: status(head) == "RUNNING", START_S)
    return {"refused": refused, "meanwhile": meanwhile, "changed": changed, "changed back": back, "status": running,
            "clients": clients.ends}  # fmt: skip


def deploy(head: Machine, good: str, limit: int | None, then: Callable[[], bool]) -> bool:
    """The file with a limit on bodies, which must be 1024 at least; whether `then` came true."""
    place = "logging: {format: json}\n"
    assert place in good
    text = good if limit is None else good.replace(place, f"{place}      ingress: {{max_body_bytes: {limit}}}\n")
    head.run('printf %s "$TEXT" > /etc/ddtree/serve.yaml && systemctl reload ddtree-serve', TEXT=text)
    return until(then, START_S)


def told(machine: Machine, key: str) -> dict[str, list[str]]:
    """Logs that hold a secret or a prompt, and, to know that they were searched, a route: Ray's, the application's,
    systemd's."""
    found = {}
    for name, text in {"key": f"printf %s {key}", "token": "cat /etc/ddtree/ray-token",
                       "password": "cat /etc/ddtree/redis-password 2>/dev/null || echo none here",
                       "prompt": f"printf %s {QUESTION!r}", "route": "echo /v1/chat/completions",
                       "unit": "echo Started ddtree-ray"}.items():  # fmt: skip
        said = machine.run(
            f"""text=$({text}); journalctl --no-pager > /run/journal
          grep -rlF -e "$text" /tmp/ray/*/logs /run/journal""",
            check=False,
        )
        found[name] = sorted({line.rsplit("/", 1)[-1] for line in said.splitlines()})
    return found


def switched(head: Machine, node: Machine, release: str, key: str) -> dict[str, Any]:
    """ "The package", in a window."""
    if release == NEW:
        for machine in (head, node):
            install(machine, release)
    before = version()
    serve_shutdown(head)
    began = time.monotonic()
    node.run("systemctl stop ddtree-ray-worker", seconds=900)
    took = time.monotonic() - began
    head.run("systemctl stop ddtree-serve ddtree-ray-head", seconds=300)
    for machine in (head, node):
        machine.run(f"/opt/ddtree/current/deploy/bare-metal/release.sh {release}")
    head.run("systemctl start ddtree-ray-head")
    node.run("systemctl start ddtree-ray-worker")
    head.run("systemctl start ddtree-serve", check=False)
    up = until(ready, START_S)
    return {"before": before, "worker stopped in": round(took), "ready": up, "answer": ask(key)[0], "after": version(),
            "status": until(lambda: status(head) == "RUNNING", START_S)}  # fmt: skip


def serve_shutdown(head: Machine) -> None:
    command = f"cd /; set -a; . /etc/ddtree/ray.env; /opt/ddtree/current/bin/serve shutdown --yes {DASHBOARD}"
    head.run(f"runuser -u ddtree -- bash -c '{command}'")


def stopped(head: Machine, node: Machine) -> dict[str, str]:
    """Processes of the service's user that are left, by name, once every unit has been stopped."""
    serve_shutdown(head)
    node.run("systemctl stop ddtree-ray-worker", seconds=900)
    head.run("systemctl stop ddtree-serve ddtree-ray-head", seconds=300)
    return {machine.name: machine.run("ps -u ddtree -o comm=", check=False) for machine in (head, node)}


def get(host: str, port: int, path: str, source: str, *more: str) -> tuple[int, str]:
    """Status and body, asked from one of this process's addresses; status 0 where nothing answers."""
    origin = [] if source == HEAD else ["--interface", source]
    words = ["curl", "-s", "--noproxy", "*", "-m", "5", *origin, "-w", "\n%{http_code}", *more]
    done = subprocess.run(
        [*words, f"http://{host}:{port}{path}"], capture_output=True, text=True, timeout=100, check=False
    )
    body, _, code = done.stdout.rpartition("\n")
    return int(code or 0), body


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(1)
    return True


if __name__ == "__main__":
    signal.alarm(1700)
    main()
