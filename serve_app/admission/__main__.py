"""`python -m serve_app.admission NAME`: make an API key. It is shown once; the entry is for the configuration."""

from __future__ import annotations

import argparse
import getpass
import re
import sys

import yaml

from serve_app.admission.keys import new_key, scrypt_hash, sha256_hash
from serve_app.config import KEY_NAME


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.admission", description=__doc__)
    parser.add_argument("name", type=_name, help="who the key is for; a label of its series")
    parser.add_argument("--ask", action="store_true", help="read a key that you chose, and hash it with scrypt")
    options = parser.parse_args(argv)
    if options.ask:
        hashed = scrypt_hash(getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n"))
    else:
        key = new_key()
        hashed = sha256_hash(key)
        print(f"key, shown only now: {key}", file=sys.stderr)
    # Quoted where YAML would read something else than a text: a number, or null.
    entry = yaml.safe_dump({"name": options.name, "hash": hashed}, default_flow_style=True, sort_keys=False, width=1000)
    print(f"- {entry}", end="")
    return 0


def _name(text: str) -> str:
    """One that the configuration takes: found out now, not when the key has been handed out."""
    if not re.fullmatch(KEY_NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 64 letters, digits and . _ -")
    return text


if __name__ == "__main__":
    sys.exit(main())
