"""The image's recipe, as far as it can be checked without building it."""

from __future__ import annotations

import re
import subprocess

from tests.conftest import ROOT
from tests.deploy.configs import DEPLOY
from tests.deploy.test_bare_metal import tool

DOCKERFILE = DEPLOY / "Dockerfile"
KINDS = ("cpu", "gpu")


def stages() -> dict[str, list[str]]:
    """Instructions of each stage, continued lines joined, comments left out."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            found[match[1]] = []
        if found:
            found[list(found)[-1]].append(line)
    return found


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_it_does_not_run_as_root() -> None:
    users = [line.split()[1] for line in stages()["image"] if line.startswith("USER ")]
    assert users[-1] == "10001:10001"


def test_the_users_number_is_the_pods() -> None:
    manifest = (ROOT / "k8s" / "base" / "rayservice.yaml").read_text()
    assert "runAsUser: 10001" in manifest and any("--uid 10001" in line for line in stages()["image"])


def test_every_kind_has_what_the_image_is_made_from() -> None:
    assert {f"{kind}-base" for kind in KINDS} <= set(stages())
    assert stages()["image"][0] == "FROM ${KIND}-base AS image"


def test_packages_of_the_cpu_kind_are_pinned() -> None:
    assert any("-c /constraints.txt" in line for line in stages()["cpu-packages"] if "pip install" in line)


def test_base_images_have_versions() -> None:
    for line in DOCKERFILE.read_text().splitlines():
        if line.startswith("FROM "):
            image = line.split()[1]
            assert image in (*stages(), "${KIND}-base") or re.search(r":\$\{?[A-Z]+|:\d", image), image


def test_what_it_copies_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for lines in stages().values():
        for line in lines:
            if line.startswith("COPY ") and "--from=" not in line:
                for source in line.split()[1:-1]:
                    assert list(ROOT.glob(source)), source
                    assert f"!{source.split('/')[0]}" in ignored


def test_stages_copied_from_exist() -> None:
    named = set(re.findall(r"--from=(\S+)", DOCKERFILE.read_text()))
    assert named <= set(stages())
