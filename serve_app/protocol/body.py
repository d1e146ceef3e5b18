"""Strict JSON: one object, valid UTF-8, no duplicate keys, no infinities, bounded nesting, a bounded number of parts.

What this module does not do: read from the network (the caller bounds the size) or know any field.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from serve_app.errors import InvalidRequest

MAX_DEPTH = 64
# Lists and objects together. What is done with each of them takes microseconds, in which the process does nothing else.
MAX_PARTS = 32_768
_SCHEMAS = frozenset({"schema", "parameters"})


class _DuplicateKey(ValueError):
    pass


def parse_object(raw: bytes) -> dict[str, Any]:
    """Decode a request body into a dictionary; keys whose value is null are dropped at every level but in JSON schemas,
    where null is a value like others.

    Raises:
        InvalidRequest: the body is not such a document; never quotes it.
    """
    try:
        # Validates first: refuses broken UTF-8, lone surrogates, NaN and infinities, which the decoder below accepts.
        _check_shape(orjson.loads(raw))
        value = json.loads(raw, object_pairs_hook=_unique)
    except _DuplicateKey:
        raise InvalidRequest("The request body has an object with the same key twice.") from None
    except (ValueError, RecursionError):
        raise InvalidRequest("The request body is not valid JSON (UTF-8).") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _DuplicateKey
    return result


def _check_shape(value: Any) -> None:
    """Raises InvalidRequest for what is nested too deeply, or has too many lists and objects in it."""
    level: list[Any] = [[value]]
    parts = 0
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        parts += len(level)
        if parts > MAX_PARTS:
            raise InvalidRequest(f"The request body may have at most {MAX_PARTS} lists and objects in it.")
        if not level:
            return
    raise InvalidRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: item if key in _SCHEMAS and isinstance(item, dict) else _without_nulls(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
