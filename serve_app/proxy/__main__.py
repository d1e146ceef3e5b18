"""`python -m serve_app.proxy DIRECTORY`: links `ddtree-haproxy`, which Serve shall start, and `haproxy`, which that
starts, into a directory, for clusters whose environment names them by one path on every node. Exit code 1 where there
is no HAProxy.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from serve_app import proxy
from serve_app.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.proxy", description=__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(argv)
    try:
        choice = proxy.choose("haproxy", os.environ)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    assert choice.binary is not None
    for name, target in {"ddtree-haproxy": proxy.SCRIPT, "haproxy": Path(choice.binary)}.items():
        link = options.directory / name
        if link.resolve() != target.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    print(choice.why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
