"""API keys: made once, kept as hashes, compared in constant time.

A key made here has 256 random bits, so that one round of SHA-256 protects it; `scrypt` is for keys that people chose.

What this module does not do: limits (`limits`), HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence

from serve_app.config import ApiKey

PREFIX = "sk-ddtree-"
MAX_KEY_CHARS = 512
# Strangers' keys that are remembered, by digest: a scrypt costs tens of milliseconds.
_CACHE = 4096
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "maxmem": 64 * 1024 * 1024}


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def sha256_hash(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def scrypt_hash(key: str, salt: bytes | None = None) -> str:
    salt = secrets.token_bytes(16) if salt is None else salt
    return f"scrypt:{salt.hex()}:{_scrypt(key, salt).hex()}"


def _scrypt(key: str, salt: bytes) -> bytes:
    return hashlib.scrypt(key.encode(), salt=salt, dklen=32, **_SCRYPT)


def matches(key: str, stored: str) -> bool:
    """Whether `key` has this hash (`sha256:hex` or `scrypt:salt:hex`)."""
    kind, *parts = stored.split(":")
    if kind == "sha256":
        return hmac.compare_digest(sha256_hash(key), stored)
    return hmac.compare_digest(_scrypt(key, bytes.fromhex(parts[0])), bytes.fromhex(parts[1]))


class KeyRing:
    """Finds the entry of a presented key. All entries are compared, whichever fits first."""

    def __init__(self, entries: Sequence[ApiKey]) -> None:
        self._fast = [entry for entry in entries if entry.hash.startswith("sha256:")]
        self._slow = [entry for entry in entries if not entry.hash.startswith("sha256:")]
        # Apart, so that strangers cannot push out who is known.
        self._known: dict[bytes, ApiKey] = {}
        self._strangers: OrderedDict[bytes, None] = OrderedDict()
        # One at a time: strangers must not keep every core busy.
        self._hashing = asyncio.Lock()

    async def find(self, key: str) -> ApiKey | None:
        if not key or len(key) > MAX_KEY_CHARS:
            return None
        found = _last_match(key, self._fast)
        if found is not None or not self._slow:
            return found
        digest = hashlib.sha256(key.encode()).digest()
        if not self._looked_up(digest):
            async with self._hashing:
                if not self._looked_up(digest):
                    self._remember(digest, await asyncio.to_thread(_last_match, key, self._slow))
        return self._known.get(digest)

    def _looked_up(self, digest: bytes) -> bool:
        return digest in self._known or digest in self._strangers

    def _remember(self, digest: bytes, found: ApiKey | None) -> None:
        if found is not None:
            self._known[digest] = found
            return
        self._strangers[digest] = None
        if len(self._strangers) > _CACHE:
            self._strangers.popitem(last=False)


def _last_match(key: str, entries: Sequence[ApiKey]) -> ApiKey | None:
    found = None
    for entry in entries:
        if matches(key, entry.hash):
            found = entry
    return found
