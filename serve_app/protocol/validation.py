"""Pydantic's findings → one error of ours, with the field's dotted name and without the client's input.

Pydantic's locations name union branches (`prompt.list[str].0`) and its messages may quote the input; neither may
reach a client.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from serve_app.errors import InvalidRequest, Unsupported
from serve_app.protocol.messages import Wire, lower_roles

Model = TypeVar("Model", bound=Wire)
_MEDIA_PARTS = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"})
_PLAIN_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")
# Their keys are the client's own, so errors stop at the field.
_MAPS = frozenset({"logit_bias", "metadata", "chat_template_kwargs"})
_TOKEN_KEYS = frozenset({"logit_bias"})
_NUMBERS = frozenset({"greater_than_equal", "less_than_equal", "float_type"})


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """`body` (see `body.parse_object`) as a wire model.

    Raises:
        InvalidRequest: the first wrong field by declaration order; `param` is `messages[0].content`-like.
        Unsupported: a field or content part that this deployment does not offer.
    """
    if "messages" in body:
        body = {**body, "messages": lower_roles(body["messages"])}
    try:
        return model.model_validate(body)
    except ValidationError as error:
        findings = error.errors(include_url=False, include_context=True, include_input=False)
    raise _as_error(model, findings, body) from None


def _as_error(model: type[BaseModel], findings: list[Any], body: dict[str, Any]) -> InvalidRequest:
    top = findings[0]["loc"][0]
    field = model.model_fields.get(str(top))
    extra = field.json_schema_extra if field else None
    if field is not None and isinstance(extra, dict) and extra.get("x-unsupported"):
        return Unsupported(f"{top} is not offered as given. {field.description}", param=str(top))
    # Of a union's branches, the one that got furthest is the one the client meant; at equal depth, the right type.
    same = [(_path(f, body), f) for f in findings if f["loc"][0] == top]
    path, finding = max(same, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    param = _dotted(path)
    if _value_at(body, path) in _MEDIA_PARTS and path[-1] == "type":
        return Unsupported("Only text content is offered; the model does not read media.", param=param)
    return InvalidRequest(
        f"{param or 'The request body'} {_reason(finding, same, len(path), param is not None)}.", param=param
    )


def _path(finding: Any, body: Any) -> list[str | int]:
    """The parts of a location that exist in the request (a missing key counts), union tags left out."""
    node, path = body, []
    for position, part in enumerate(finding["loc"]):
        last = position == len(finding["loc"]) - 1
        inside = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if inside:
            node = node[part]
            path.append(part)
        elif last and finding["type"] == "missing":
            path.append(part)
        if path and path[0] in _MAPS:
            break
    if finding["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append(finding["ctx"]["discriminator"].strip("'"))
    return path


def _dotted(path: list[str | int]) -> str | None:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_NAME.match(part):
            text += f".{part}" if text else part
        else:
            break
    return text or None


def _value_at(node: Any, path: list[str | int]) -> str | None:
    for part in path:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return None
    return node if isinstance(node, str) else None


def _reason(finding: Any, same: list[tuple[list[str | int], Any]], depth: int, named: bool) -> str:
    kind, where = finding["type"], finding["loc"]
    if where[0] in _MAPS and where[-1] == "[key]":
        return "has a key that is no token id" if where[0] in _TOKEN_KEYS else f"has a key that {_phrase(finding)}"
    if where[0] in _TOKEN_KEYS and kind in _NUMBERS:
        return f"has a value that {_phrase(finding)}"
    if kind in ("missing", "union_tag_not_found"):
        return "is required"
    if kind == "extra_forbidden":
        return "is not a known parameter" if named else "has an unknown parameter"
    if kind == "union_tag_invalid":
        return f"must be one of {finding['ctx']['expected_tags']}"
    if kind == "none_required":
        return "must be null"
    if kind.endswith("_type"):
        types = dict.fromkeys(_phrase(f) for path, f in same if len(path) == depth and f["type"].endswith("_type"))
        return " or ".join(types)
    return _phrase(finding)


def _phrase(finding: Any) -> str:
    message = str(finding["msg"])
    for opening in ("Input should", "List should", "String should", "Dictionary should", "Value should"):
        message = message.replace(opening, "must")
    return message.removeprefix("Value error, ").replace(" after validation", "")
