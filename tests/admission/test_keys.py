"""API keys and their hashes."""

import asyncio
import io
from typing import Any

import pytest
import yaml

from serve_app.admission.__main__ import main
from serve_app.admission.keys import KeyRing, matches, new_key, scrypt_hash, sha256_hash
from serve_app.config import ApiKey, load_config
from serve_app.errors import ConfigError


@pytest.mark.parametrize("hash_key", [sha256_hash, scrypt_hash])
def test_a_key_matches_its_own_hash_and_no_other(hash_key: Any) -> None:
    assert matches("one", hash_key("one")) and not matches("two", hash_key("one"))


def test_the_same_key_has_another_scrypt_hash_each_time() -> None:
    assert scrypt_hash("one") != scrypt_hash("one")


def test_no_two_keys_are_alike() -> None:
    assert len({new_key() for _ in range(100)}) == 100


async def test_a_ring_finds_the_entry_of_either_kind() -> None:
    entries = [ApiKey(name="a", hash=sha256_hash("ka")), ApiKey(name="b", hash=scrypt_hash("kb"))]
    ring = KeyRing(entries)
    found = [await ring.find(key) for key in ("ka", "kb", "kb", "kc", "", "k" * 10_000)]
    assert [entry and entry.name for entry in found] == ["a", "b", "b", None, None, None]


async def test_who_is_known_does_not_wait_behind_strangers() -> None:
    ring = KeyRing([ApiKey(name="a", hash=scrypt_hash("ka"))])
    assert await ring.find("ka") and await ring.find("kb") is None
    async with ring._hashing:  # a stranger's turn
        assert [await asyncio.wait_for(ring.find(key), 30) is not None for key in ("ka", "kb")] == [True, False]


async def test_strangers_do_not_push_out_who_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.admission.keys._CACHE", 2)
    ring = KeyRing([ApiKey(name="a", hash=scrypt_hash("ka"))])
    for key in ("ka", "k1", "k2", "k3"):
        await ring.find(key)
    async with ring._hashing:
        assert await asyncio.wait_for(ring.find("ka"), 30)
    assert len(ring._strangers) == 2


async def test_every_entry_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def counting(key: str, stored: str) -> bool:
        compared.append(stored)
        return matches(key, stored)

    monkeypatch.setattr("serve_app.admission.keys.matches", counting)
    entries = [ApiKey(name=f"k{i}", hash=sha256_hash(f"k{i}")) for i in range(5)]
    await KeyRing(entries).find("k0")
    assert len(compared) == 5


@pytest.mark.parametrize(
    "stored", ["plain", "sha256:12", "md5:" + "0" * 64, "scrypt:zz:" + "0" * 64, "sha256:" + "G" * 64]
)
def test_a_malformed_hash_is_refused_at_start(stored: str) -> None:
    keys = [{"name": "a", "hash": sha256_hash("a")}, {"name": "b", "hash": stored}]
    with pytest.raises(
        ConfigError, match=r"admission\.keys\[1\]\.hash: .*serve_app\.admission NAME makes one"
    ) as caught:
        load_config({"admission": {"keys": keys}}, use_env=False)
    assert caught.value.param == "admission.keys[1].hash" and stored not in caught.value.message


@pytest.mark.parametrize("what", ["name", "hash"])
def test_two_keys_alike_are_refused(what: str) -> None:
    keys = [{"name": "a", "hash": sha256_hash("a")}, {"name": "b", "hash": sha256_hash("b")}]
    keys[1][what] = keys[0][what]
    with pytest.raises(ConfigError, match=f"same {what}"):
        load_config({"admission": {"keys": keys}}, use_env=False)


def test_a_hash_is_not_printed_with_the_configuration() -> None:
    config = load_config({"admission": {"keys": [{"name": "a", "hash": sha256_hash("a")}]}}, use_env=False)
    assert "sha256:" not in repr(config)


def test_the_command_makes_a_key_that_its_entry_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["team"]) == 0
    shown, told = capsys.readouterr()
    key = told.split()[-1]
    stored = shown.split("'")[1]
    assert matches(key, stored) and key not in shown


@pytest.mark.parametrize("name", ["team-a", "2024", "null", "on", "1e3", "_"])
def test_the_configuration_takes_the_entry_as_it_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    config = load_config({"admission": {"keys": yaml.safe_load(capsys.readouterr().out)}}, use_env=False)
    assert config.admission.keys[0].name == name


@pytest.mark.parametrize("name", ["team a", "a: b", "", "x" * 65, "a\n"])
def test_no_key_is_made_under_a_name_that_the_configuration_refuses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name])
    shown, told = capsys.readouterr()
    assert shown == "" and "key, shown only now" not in told


def test_a_chosen_key_is_hashed_with_scrypt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("my own\n"))
    assert main(["team", "--ask"]) == 0
    stored = capsys.readouterr().out.split("'")[1]
    assert stored.startswith("scrypt:") and matches("my own", stored)
