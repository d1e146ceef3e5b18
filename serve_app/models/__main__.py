"""`python -m serve_app.models list | path NAME | fetch NAME | verify NAME | eval …`.

Paths and lists go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed (one line says why), 2 wrong
usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_app.errors import ModelFetchError
from serve_app.models import cache, drafter, fetch, registry
from serve_app.models.sources import check_model, is_local, local_path, resolve, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    if arguments_given[:1] == ["eval"]:
        # Needs torch and has options of its own; everything else starts without them.
        from serve_app.models.eval import main as evaluate

        return evaluate(arguments_given[1:])
    arguments = _parser().parse_args(arguments_given)
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("serve_app.models").setLevel(logging.INFO)
    # A container stops with SIGTERM; as an exception it cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        root = cache.cache_root(arguments.cache)
        return int(arguments.run(arguments, root) or 0)
    except ModelFetchError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing half-written is left, and the next run continues", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve_app.models", description="Fetch and check models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, *, takes_name: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--cache", metavar="DIR", help="instead of $DDTREE_CACHE or ~/.cache/ddtree-serve")
        if takes_name:
            command.add_argument("name", metavar="NAME", help="known name, local directory or Hugging Face id")
        return command

    add("list", _list, "known models, and whether they are in the cache", takes_name=False)
    add("path", _path, "print the directory of a model that is in the cache")
    force = add("fetch", _fetch, "fetch and convert a model, and print its directory")
    force.add_argument("--force", action="store_true", help="even if it is in the cache")
    add("verify", _verify, "hash every file of a cached model")
    commands.add_parser("eval", help="acceptance of a drafter on held-out prompts (`eval --help`)")
    return parser


def _list(arguments: argparse.Namespace, root: Path) -> None:
    for model in registry.all_known():
        state = fetch.damage(model, root) or "ready"
        draft = "drafter shipped" if drafter.shipped(model.name) else "no drafter"
        print(f"{model.name}\t{state}\t{draft}\t{model.about}")


def _path(arguments: argparse.Namespace, root: Path) -> None:
    print(_cached(arguments.name, root, full=False))


def _fetch(arguments: argparse.Namespace, root: Path) -> None:
    print(resolve(arguments.name, force=arguments.force, cache_dir=root).path)


def _verify(arguments: argparse.Namespace, root: Path) -> None:
    path = _cached(arguments.name, root, full=True)
    how = "every file has its SHA-256" if registry.find(arguments.name) else "complete (it has no hashes)"
    print(f"{path}: {how}", file=sys.stderr)


def _cached(name: str, root: Path, *, full: bool) -> Path:
    if model := registry.find(name):
        with cache.clear_errors(f"read {name}", root):
            problem = fetch.damage(model, root, full=full)
        if problem:
            mend = "fetch it" if problem == cache.ABSENT else f"run `fetch {name} --force`"
            raise ModelFetchError(f"{fetch.directory(model, root)}: {problem}; {mend}")
        return fetch.directory(model, root)
    if not is_local(name):
        if "/" in name:
            raise ModelFetchError(f"{name}: Hugging Face keeps a cache of its own; `fetch {name}` prints the directory")
        raise unknown(name)
    path = local_path(name)
    check_model(path)
    return path


def _terminate(signum: int, frame: Any) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
