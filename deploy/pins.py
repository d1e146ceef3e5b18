"""`python -m deploy.pins FILE REQUIREMENT…`: write the versions that pip resolves today as a constraints file.

Nothing is installed: pip's resolver runs dry, for this Python and this machine's indexes. Local parts of versions
(`+cpu`) are left out, so that any build of a release satisfies its pin. What this module does not do: hashes,
which differ by machine, or markers: a package that only another platform needs is not in the file, and not held there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS = "ddtree-serve"
HEADER = """\
# One `name==version` a line: what a tested release was resolved to.
# Made by (make constraints writes it anew):
#   python -m deploy.pins {arguments}
"""


def main(arguments: Sequence[str]) -> int:
    """Exit code of pip."""
    file, *requirements = arguments
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        done = subprocess.run([*pip, "--report", str(report), *requirements], check=False)
        if done.returncode == 0:
            command = " ".join(f"'{word}'" if "[" in word else word for word in arguments)
            Path(file).write_text(HEADER.format(arguments=command) + pins(json.loads(report.read_text())))
    return done.returncode


def pins(report: dict[str, Any]) -> str:
    """Lines for a pip installation report, sorted by name, without this project itself."""
    found = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}
    return "".join(f"{name}=={version.split('+')[0]}\n" for name, version in sorted(found.items()) if name != OURS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
