"""`python -m serve_app.launch`: `serve run serve_app:app` on a port of choice, with a word when it is ready.

It does what Ray's own command does, on the asked address (`serve run` takes one only from a file), in a Ray of its own
unless RAY_ADDRESS names a cluster. It adds Serve's switches, checks before anything starts, the wait for the first
generated token, one line to try, a drain before the end, and an exit code and a last line that tell a failure from a
stop. Configuration is the environment's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from serve_app import proxy
from serve_app.config import Config, load_config
from serve_app.engines.checks import check_machine
from serve_app.errors import ConfigError, ServeError

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

POLL_S = 0.5
APP_NAME = "default"  # what `serve run` calls it
# A signal has asked for the end.
_stopping = threading.Event()
# Serve's shutdown has begun; to interrupt that would leave HAProxy and Ray behind.
_ending = threading.Event()
# The server is asked directly, whatever proxy the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Ray Serve's own switches, read when it is imported, for all processes of the cluster started here. Tokens travel over
# gRPC on the replica's own event loop: about half the CPU per chunk (docs/findings.md). Nothing blocks that loop, since
# the engine steps in its own thread. A whole answer with log-probabilities may be larger than gRPC's default message.
SERVE_SWITCHES = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.edge.middlewares",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 1024 * 1024),
    # One that hangs has nothing to finish: its streams go on elsewhere as soon as it is gone.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ray's default of 15 is inherited by SGLang's scheduler, which then waits for anything else that runs on the node.
    "RAY_worker_niceness": "0",
}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 after a stop that was asked for, 1 when the application could not be started."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.launch", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument(
        "--proxy", choices=("auto", "serve", "haproxy"), default="auto",
        help="what takes the clients' connections: Serve's own proxy or its HAProxy, auto for that where there is one",
    )  # fmt: skip
    parser.add_argument("--switches", action="store_true", help="print Serve's switches as shell exports, and exit")
    options = parser.parse_args(argv)
    try:
        config = load_config()
        if options.switches:
            # What one node happens to have must not decide for a cluster.
            chosen = {} if options.proxy == "auto" else _proxy_switches(options.proxy, config)
            print("\n".join(f"export {name}={value}" for name, value in {**SERVE_SWITCHES, **chosen}.items()))
            return 0
        if not os.environ.get("RAY_ADDRESS"):
            check_machine(config)  # another cluster's nodes may have what this one lacks
        choice = _choose(options.proxy, options.host)
        _check_port(options.host, options.port)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    base = f"http://{_in_url(reached)}:{options.port}"
    threading.Thread(target=_announce, args=(base, config), daemon=True).start()
    with _switched(choice, config, options.host):
        failure = _serve(options.host, options.port, config)
    # After everything that Ray has to say about its own end, which sounds worse than it is.
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    _say("Stopped.")
    return 0


def _say(text: str) -> None:
    """A line for whoever reads them. One who has left keeps the application neither from running nor from its end."""
    try:
        print(text, flush=True)
    except OSError:
        # What is left in its buffer would be tried again at the exit, and turn its code into a failure's.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _choose(wanted: proxy.Wanted, host: str) -> proxy.Choice:
    """As `proxy.choose`. Serve's HAProxy finds the ingress processes at IPv4 addresses, whatever they listen on.

    Raises:
        ConfigError: HAProxy is wanted for an IPv6 address, or there is none.
    """
    if not _is_ipv6(host):
        return proxy.choose(wanted, os.environ)
    if wanted == "haproxy":
        raise ConfigError(f"--proxy haproxy takes IPv4 addresses alone, and --host is {host}", param="proxy")
    return proxy.Choice(None, "HAProxy takes IPv4 addresses alone")


def _is_ipv6(host: str) -> bool:
    return ":" in host


def _in_url(host: str) -> str:
    return f"[{host}]" if _is_ipv6(host) else host


def _proxy_switches(wanted: proxy.Wanted, config: Config) -> dict[str, str]:
    return proxy.switches(proxy.choose(wanted, os.environ), config.ingress.request_timeout_s)


@contextlib.contextmanager
def _switched(choice: proxy.Choice, config: Config, host: str) -> Iterator[None]:
    """With Serve's switches in the environment, and a directory for HAProxy's files."""
    proxy.apply(SERVE_SWITCHES)
    if os.environ.get("RAY_ADDRESS"):
        yield  # that cluster's proxies are what they are
        return
    _say(f"In front: {'HAProxy' if choice.binary else 'the proxy of Serve'} ({choice.why}).")
    proxy.apply(proxy.switches(choice, config.ingress.request_timeout_s))
    if choice.binary is None:
        yield
        return
    # Short: HAProxy puts unix sockets there.
    with tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        proxy.apply(proxy.local_switches(directory, host))
        yield


def _serve(host: str, port: int, config: Config) -> str | None:
    """Runs the application until it is stopped, drained. Every way to stop ends in a KeyboardInterrupt.

    Returns:
        Why the application could not be started, or None.
    """
    _on_stop(_stop_soon)
    import ray
    from ray import serve

    from serve_app.build import bind

    try:
        application = bind(config)
        _check_stop()
        # Without an address Ray would join any cluster that runs on this machine, and Serve replace its application.
        ray.init(address=os.environ.get("RAY_ADDRESS") or "local", namespace="serve")
        # After ray.init, which installs handlers of its own.
        _on_stop(_drain_first)
        _check_stop()
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name=APP_NAME)
        while True:
            time.sleep(POLL_S)  # not signal.pause, which a signal just before it would not end
    except KeyboardInterrupt:
        return None
    except SystemExit as end:
        # Ray's own answer to SIGTERM, for as long as it starts.
        if end.code != signal.SIGTERM:
            raise
        return None
    except Exception as error:
        # A drain deletes the application; where it had not started yet, that ends the wait for it.
        if _stopping.is_set():
            return None
        _ending.set()
        if isinstance(error, ServeError):
            return error.message
        traceback.print_exc()
        return _cause(_status(), str(error))
    finally:
        _ending.set()
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()


def _status() -> ServeStatus | None:
    import ray
    from ray import serve

    try:
        return serve.status() if ray.is_initialized() else None
    except Exception:
        return None  # Serve itself is what failed


def _cause(status: ServeStatus | None, otherwise: str) -> str:
    """The last line of what a deployment's constructor raised, if one did."""
    application = status.applications.get(APP_NAME) if status is not None else None
    for name, deployment in application.deployments.items() if application is not None else ():
        lines = deployment.message.strip().splitlines()
        if deployment.status in ("UNHEALTHY", "DEPLOY_FAILED") and lines:
            return f"deployment {name}: {lines[-1].strip()}"
    return otherwise


def _on_stop(handler: Callable[..., None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A shell starts background jobs with SIGINT ignored, nohup its command with SIGHUP: that is meant.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _stop_soon(*_: object) -> None:
    """While there is nothing to drain yet. To raise inside an import may leave logging's lock taken for ever, or be
    swallowed there; a second signal does not wait."""
    _on_stop(_interrupt)
    _stopping.set()


def _check_stop() -> None:
    if _stopping.is_set():
        raise KeyboardInterrupt


def _drain_first(*_: object) -> None:
    """Serve's shutdown kills the proxies before anything else, which would cut running answers; deleting the
    application first lets them end, within the replicas' own time. A second signal does not wait."""
    _stopping.set()
    _on_stop(_interrupt)
    # Not here: the main thread may be inside Ray, holding its locks.
    threading.Thread(target=_drain, daemon=True).start()


def _drain() -> None:
    from ray import serve

    _say("Stopping when the running answers have ended; once more (Ctrl-C) cuts them.")
    try:
        serve.delete(APP_NAME)
    except Exception as error:
        if not _ending.is_set():
            print(f"the application did not drain: {error}", file=sys.stderr)
    if _ending.is_set():
        return  # a second signal did not wait for this
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # Not SIGINT, which may be ignored.
    signal.pthread_kill(main_thread, signal.SIGTERM)


def _interrupt(*_: object) -> None:
    if not _ending.is_set():
        _ending.set()
        raise KeyboardInterrupt


def _check_port(host: str, port: int) -> None:
    """Ray reports a taken port only in a log of its proxy; say so before anything starts."""
    if not 0 < port < 65536:
        raise ConfigError(f"port {port} is not from 1 to 65535", param="port")
    with socket.socket(socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = f"{_in_url(host)}:{port}"
            reason = f"cannot listen on {where}: {error.strerror}; choose another --port or --host"
            raise ConfigError(reason, param="port") from None


def _announce(base: str, config: Config) -> None:
    while not _ready(base):
        time.sleep(POLL_S)
    _say(f"\nReady on {base}. Try:\n\n  {_example(base, config)}\n\nCtrl-C stops.")


def _example(base: str, config: Config) -> str:
    """A command that asks the application something, for a shell."""
    messages = '[{"role": "user", "content": "Name three colours."}]'
    body = f'{{"model": "{config.model.id}", "temperature": 0, "messages": {messages}}}'
    key = ' -H "Authorization: Bearer $KEY"' if config.admission.keys else ""
    return f"curl {base}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _ready(base: str) -> bool:
    try:
        with _DIRECT.open(f"{base}/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
