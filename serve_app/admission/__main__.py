"""`python -m serve_app.admission NAME`: make an API key. It is shown once; the entry is for the configuration."""

from __future__ import annotations

import argparse
import getpass
import sys

from serve_app.admission.keys import new_key, scrypt_hash, sha256_hash


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.admission", description=__doc__)
    parser.add_argument("name", help="who the key is for; a label of its series")
    parser.add_argument("--ask", action="store_true", help="read a key that you chose, and hash it with scrypt")
    options = parser.parse_args(argv)
    if options.ask:
        hashed = scrypt_hash(getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n"))
    else:
        key = new_key()
        hashed = sha256_hash(key)
        print(f"key, shown only now: {key}", file=sys.stderr)
    print(f"- {{name: {options.name}, hash: '{hashed}'}}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
