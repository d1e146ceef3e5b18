"""A CustomResourceDefinition's openAPIV3Schema applied as an API server does: defaults first, then strictly.

Not done: CEL rules (x-kubernetes-validations), which need a CEL interpreter.
"""

from __future__ import annotations

import copy
from typing import Any

import jsonschema


def validated(instance: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What is wrong, one line each."""
    complete = with_defaults(copy.deepcopy(instance), schema)
    errors = jsonschema.Draft7Validator(closed(schema)).iter_errors(complete)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


def with_defaults(node: Any, schema: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        for name, part in schema.get("properties", {}).items():
            if name not in node and "default" in part:
                node[name] = copy.deepcopy(part["default"])
            if name in node:
                with_defaults(node[name], part)
    elif isinstance(node, list) and isinstance(schema.get("items"), dict):
        for item in node:
            with_defaults(item, schema["items"])
    return node


def closed(schema: Any) -> Any:
    """Unknown keys are errors wherever the schema lists the known ones; integers or strings where it says so."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields", False)))
    return found
