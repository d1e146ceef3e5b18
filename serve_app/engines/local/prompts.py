"""From a request to prompt token ids: plain text, ids, or chat messages through the model's own template.

Special tokens spelled in a plain text are those tokens; spelled in a message they are text (`literal`).

What this module does not do: check lengths, or parse tool calls out of answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from serve_app.engines.base import GenerateRequest
from serve_app.engines.local.literal import LiteralEncoder, Shield
from serve_app.errors import ContextLengthExceeded, InvalidRequest, Unsupported


class PromptRenderer:
    """Renders and encodes prompts with a transformers tokenizer.

    Args:
        vocab: ids at or above it are refused.
        floor: fewest tokens that a text can have; `token_floor`.
    """

    def __init__(self, tokenizer: Any, vocab: int, floor: Callable[[str], int] = lambda text: 0) -> None:
        self._tokenizer, self._vocab, self._floor = tokenizer, vocab, floor
        self._chats = LiteralEncoder(tokenizer)

    def encode(self, request: GenerateRequest, context: int | None = None) -> list[int]:
        """Token ids of the prompt, at least one.

        Args:
            context: refuse a text, before it is tokenised, that surely has this many tokens. Others pass, whatever
                their length.

        Raises:
            ContextLengthExceeded: see `context`.
            InvalidRequest: no prompt, an unknown token id, or messages that the template refuses.
            Unsupported: content parts that are not text, or tools when the template has no place for them.
        """
        if request.messages is not None:
            text, shield = self._chat(request)
            self._refuse_hopeless(shield.lift(text), "messages", context)
            return self._chats.encode(text, shield)
        if request.prompt_token_ids is not None:
            ids = list(request.prompt_token_ids)
            if any(not 0 <= token < self._vocab for token in ids):
                raise InvalidRequest(f"prompt token ids must be from 0 to {self._vocab - 1}", param="prompt")
        else:
            text = _valid(request.prompt or "", "prompt")
            self._refuse_hopeless(text, "prompt", context)
            ids = list(self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return ids

    def _refuse_hopeless(self, text: str, param: str, context: int | None) -> None:
        if context is not None and (least := self._floor(text)) >= context:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens; this model's context holds {context}, answer included",
                param=param,
            )

    def _chat(self, request: GenerateRequest) -> tuple[str, Shield]:
        """The rendered messages, and what covers special tokens in them."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead", param="messages")
        if request.tools and "tools" not in str(template):
            raise Unsupported("this model's chat template takes no tools", param="tools")
        shield = self._chats.shield()
        if not request.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        options = {"add_generation_prompt": True, **shield.cover(request.chat_template_kwargs), "tokenize": False}
        tools = [shield.cover(tool) for tool in request.tools] if request.tools else None
        try:
            messages = [shield.cover(_plain(message, index)) for index, message in enumerate(request.messages)]
            text = self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from None
        # A call's arguments are JSON within a string, which nobody has bounded: they may be nested too deeply.
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages ({type(error).__name__})", param="messages"
            ) from None
        return _valid(text, "messages"), shield


def _valid(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can carry
        raise InvalidRequest("the text is not valid Unicode", param=param) from None
    return text


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: content as one string, tool-call arguments as objects."""
    plain = dict(message)
    plain["content"] = _text(message.get("content"), index)
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, Sequence) else [content]
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal"):
            raise Unsupported("only text content is supported", param=f"messages[{index}].content[{number}]")
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in parts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What a model wrote need not be JSON; templates can print it as it is.
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function}
