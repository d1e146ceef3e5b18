"""What a chat with tools or reasoning is to SGLang: its prompt, its grammar, and who reads its answer.

Everything is asked of SGLang's own classes as its OpenAI server asks them (`entrypoints/openai/serving_chat.py`): which
parser, which structural tag or schema, whether the template's prompt begins in the middle of reasoning.

What this module does not do: read an answer (`reading`), or render a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from serve_app.config import SglangConfig
from serve_app.engines.base import GenerateRequest
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.engines.sglang.parsed import Reader
from serve_app.engines.sglang.reading import ToolParser, ToolReader
from serve_app.engines.sglang.reasoning import ReasoningReader
from serve_app.engines.sglang.tool_parsers import ArrayParser, HarmonyParser, NativeParser
from serve_app.errors import ConfigError, InvalidRequest, Unsupported

# SGLang's other grammar backends know neither a tag that must come nor the newer kind of tags; to them a mark that is a
# token of its own is no text; and with a reasoning parser they fail at every grammar.
_TAGS = ("xgrammar",)


class Spelled(Vocabulary):
    """The same tokens, where special ones are text: some formats are made of them."""

    def is_special(self, token: int) -> bool:
        return False

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@dataclass(frozen=True)
class Plan:
    """How a request is put to SGLang, and how its answers are read.

    Attributes:
        prompt: the request as the chat template gets it. grammar: sampling parameters that hold its answers to a
            format. reasons: the answer begins with reasoning, which no grammar holds for. spelled: special tokens are
            part of the text. read: makes the reader of a choice, None where text is all there is.
    """

    prompt: GenerateRequest
    grammar: Mapping[str, str] = field(default_factory=dict)
    reasons: bool = False
    spelled: bool = False
    read: Callable[[], Reader] | None = None


class Tooling:
    """Of one started SGLang.

    Args:
        manager: its TokenizerManager. templates: its TemplateManager.

    Attributes:
        tools, reasoning: whether it has the parser. spelled: see `Spelled`.

    Raises:
        ConfigError: the model cannot use a parser that is configured.
    """

    def __init__(self, manager: Any, templates: Any) -> None:
        arguments = manager.server_args
        self._tool_parser, self._reasoning_parser = arguments.tool_call_parser, arguments.reasoning_parser
        self.tools, self.reasoning = bool(self._tool_parser), bool(self._reasoning_parser)
        self.spelled = Spelled(manager.tokenizer)
        self._tokenizer = manager.tokenizer
        self._defaults = dict(arguments.default_chat_template_kwargs or {})
        self._tags = arguments.grammar_backend in _TAGS
        self._serving: Any = None
        self._known: dict[str, int | None] = {}
        if self.tools or self.reasoning:
            from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

            # What it cannot parse, which it logs, is what the model said.
            logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
            self._serving = OpenAIServingChat(manager, templates)
            self._check()

    def _check(self) -> None:
        param = "sglang.tool_call_parser" if self.tools else "sglang.reasoning_parser"
        spec = self._serving.chat_encoding_spec
        if spec is not None:
            raise ConfigError(f"{param}: prompts in SGLang's own encoding, {spec}, are not offered", param=param)
        if self.tools and "tools" not in str(self._tokenizer.chat_template or ""):
            raise ConfigError(f"{param}: the model's chat template takes no tools", param=param)

    def plan(self, request: GenerateRequest) -> Plan:
        """Raises InvalidRequest or Unsupported, naming the field."""
        if request.messages is None:
            return Plan(request)
        request = replace(request, chat_template_kwargs={**self._defaults, **request.chat_template_kwargs})
        if self._serving is None:
            return Plan(request)
        tools = _checked(request.tools or ())
        asked = self._asked(request, tools)
        reasons = self._serving._get_reasoning_from_request(asked)
        if reasons and request.reasoning_effort == "none":
            raise Unsupported("this model always reasons", param="reasoning_effort")
        splits = self.reasoning and request.separate_reasoning
        if splits and request.sampling.logprobs is not None and reasons:
            # Its tokens are no text of the answer.
            raise Unsupported("logprobs cannot be combined with reasoning", param="logprobs")
        grammar, read_tools = self._calls(request, asked) if tools else ({}, None)
        if grammar and request.emitted:
            raise Unsupported("an answer with a grammar cannot be continued", param="emitted")
        self._serving._patch_reasoning_skip_special_tokens(asked)
        reader = None
        if splits or read_tools:
            reader = _Readers(self._reasoning(asked) if splits else None, read_tools, self._token)
        return Plan(
            _prompt(request, asked, tools),
            grammar,
            reasons,
            spelled=bool(tools) or not asked.skip_special_tokens or self._serving.is_gpt_oss or self._serving.is_gemma4,
            read=reader,
        )

    def _asked(self, request: GenerateRequest, tools: Sequence[Mapping[str, Any]]) -> Any:
        """The request as SGLang's OpenAI server knows it, without its messages."""
        from pydantic import ValidationError
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        kwargs = dict(request.chat_template_kwargs)
        effort = kwargs.pop("reasoning_effort", None)  # a template's variable of this name is the same wish
        choice: Any = request.tool_choice
        if request.named_tool is not None:
            choice = {"type": "function", "function": {"name": request.named_tool}}
        try:
            return ChatCompletionRequest.model_validate(
                {
                    "messages": [{"role": "user", "content": ""}],
                    "chat_template_kwargs": kwargs,
                    "reasoning_effort": request.reasoning_effort or effort,
                    "tools": tools or None,
                    "tool_choice": choice if tools else "none",
                    "parallel_tool_calls": request.parallel_tool_calls,
                }
            )
        except ValidationError:
            raise InvalidRequest("reasoning_effort is none that SGLang knows", param="chat_template_kwargs") from None

    def _reasoning(self, asked: Any) -> Callable[[], ReasoningReader]:
        from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector, ReasoningParser

        force = self._serving.template_manager.force_reasoning or self._serving._get_reasoning_from_request(asked)

        def make() -> ReasoningReader:
            parser = ReasoningParser(self._reasoning_parser, True, force, asked, tokenizer=self._tokenizer)
            plain = (
                type(parser.detector).parse_streaming_increment is BaseReasoningFormatDetector.parse_streaming_increment
            )
            return ReasoningReader(parser, plain)

        return make

    def _calls(self, request: GenerateRequest, asked: Any) -> tuple[dict[str, str], Callable[[], ToolReader]]:
        """What holds the answer to calls, where something must, and who reads them. Raises InvalidRequest or
        Unsupported, naming the field."""
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.function_call.gpt_oss_detector import GptOssDetector

        def make() -> FunctionCallParser:
            return FunctionCallParser(asked.tools, self._tool_parser, tokenizer=self._tokenizer)

        def native() -> ToolParser:
            return HarmonyParser(make) if isinstance(detector, GptOssDetector) else NativeParser(make())

        called = sum(len(message.get("tool_calls") or ()) for message in request.messages or ())

        def reader(make: Callable[[], ToolParser]) -> Callable[[], ToolReader]:
            return lambda: ToolReader(make, names, lambda name, index: self._call_id(name, index, called), one, must)

        one, must = not request.parallel_tool_calls, request.tool_choice != "auto"
        detector: Any = make().detector
        tagged = detector.supports_structural_tag()
        allowed = _allowed(request, asked.tools)
        names = {tool.function.name for tool in allowed}
        if must and not (tagged and self._tags) and not detector.parses_required_natively():
            return _array_grammar(allowed, not one), reader(lambda: ArrayParser(asked.tools))
        held = must or any(tool.function.strict for tool in allowed)
        parser = FunctionCallParser(
            [_object_arguments(tool) for tool in allowed] if held and _takes_any_json(detector) else allowed,
            self._tool_parser,
            tokenizer=self._tokenizer,
        )
        constraint = parser.get_structure_constraint(asked.tool_choice, parallel_tool_calls=not one)
        if held and constraint is None and tagged:
            # It logs what it cannot do, and would go on without.
            raise InvalidRequest("SGLang cannot make a grammar of these tools", param="tools")
        if held and (constraint is None or not self._tags):
            first = next(index for index, tool in enumerate(asked.tools) if tool.function.strict)
            raise Unsupported(
                "strict is not offered with this model's format of calls, or this grammar backend, unless tool_choice "
                "says that a call must come",
                param=f"tools[{first}].function.strict",
            )
        return ({constraint[0]: _text(constraint[1])} if constraint else {}), reader(native)

    def _token(self, mark: str) -> int | None:
        """The token that is a mark, None where it is several."""
        if mark and mark not in self._known:
            tokens = self._tokenizer.encode(mark, add_special_tokens=False)
            self._known[mark] = tokens[0] if len(tokens) == 1 else None
        return self._known.get(mark)

    def _call_id(self, name: str, index: int, called: int) -> str:
        """In the form that the model's own template wants to see again."""
        from sglang.srt.function_call.core_types import ToolCallItem

        item = ToolCallItem(tool_index=index, name=name, parameters="")
        made: str = self._serving._process_tool_call_id(item, called)
        return made


@dataclass(frozen=True)
class _Readers:
    """Makes the reader of a choice."""

    reasoning: Callable[[], ReasoningReader] | None
    tools: Callable[[], ToolReader] | None
    token: Callable[[str], int | None]

    def __call__(self) -> Reader:
        tools = self.tools() if self.tools else None
        return Reader(self.reasoning() if self.reasoning else None, tools, self.token(tools.closing) if tools else None)


def has_grammars(backend: str | None, reasoning: bool) -> bool:
    """Whether a grammar backend, beside a reasoning parser or none, holds an answer to a JSON schema."""
    return backend in _TAGS if reasoning else backend not in (None, "none")


def check_parsers(config: SglangConfig, tools: Collection[str], reasoning: Collection[str]) -> None:
    """Raises ConfigError for a parser that SGLang does not have."""
    for name, known in (("tool_call_parser", tools), ("reasoning_parser", reasoning)):
        given, param = getattr(config, name), f"sglang.{name}"
        if given is not None and given not in known:
            raise ConfigError(f"{param}: SGLang has no {given}; it has {', '.join(sorted(known))}", param=param)


def _checked(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose parameters are JSON schemas, types in other words than JSON Schema's put right as SGLang does."""
    if not tools:
        return []
    from jsonschema import Draft202012Validator, SchemaError
    from sglang.srt.function_call.utils import normalize_json_schema_types

    found = []
    for index, tool in enumerate(tools):
        try:
            function = orjson.loads(orjson.dumps(tool["function"]))  # it is changed in its place
            if schema := function.get("parameters"):
                schema.setdefault("type", "object")
            normalize_json_schema_types(schema)
            Draft202012Validator.check_schema(schema or {})
        except (SchemaError, RecursionError, orjson.JSONEncodeError):  # the last: a number of more than 64 bits
            raise InvalidRequest(
                f"tools[{index}].function.parameters is not a JSON Schema.", param=f"tools[{index}].function.parameters"
            ) from None
        found.append({"type": "function", "function": function})
    return found


def _prompt(request: GenerateRequest, asked: Any, tools: Sequence[Mapping[str, Any]]) -> GenerateRequest:
    """Of one tool to be called the template sees no others, as SGLang has it."""
    shown = [tool for tool in tools if request.named_tool in (None, tool["function"]["name"])]
    effort = {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
    return replace(request, tools=shown or None, chat_template_kwargs={**effort, **(asked.chat_template_kwargs or {})})


def _allowed(request: GenerateRequest, tools: Sequence[Any]) -> list[Any]:
    """Those that an answer may call."""
    return [tool for tool in tools if request.named_tool in (None, tool.function.name)]


def _takes_any_json(detector: Any) -> bool:
    """Whether the format's tag holds arguments to nothing where they are not strict; they may then be a number."""
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector

    own = type(detector).get_structural_tag is not BaseFormatDetector.get_structural_tag
    return not own and detector.get_structural_tag_name() is None


def _object_arguments(tool: Any) -> Any:
    """The same tool; where it is not strict, its arguments are any object."""
    if tool.function.strict:
        return tool
    loose = tool.function.model_copy(update={"strict": True, "parameters": {"type": "object"}})
    return tool.model_copy(update={"function": loose})


def _array_grammar(allowed: Sequence[Any], parallel: bool) -> dict[str, str]:
    """A JSON schema of an array of calls; also of a single tool, of which SGLang's own would allow what is no call."""
    from sglang.srt.function_call.utils import get_json_schema_constraint

    try:
        schema: Any = get_json_schema_constraint(list(allowed), "required", parallel_tool_calls=parallel)
    except ValueError:
        raise InvalidRequest("$defs of one name differ between tools", param="tools") from None
    for call in schema["items"]["anyOf"]:
        call |= {"type": "object", "additionalProperties": False}
    return {"json_schema": _text(schema)}


def _text(constraint: Any) -> str:
    from sglang.srt.entrypoints.openai.protocol import convert_json_schema_to_str

    plain = constraint if isinstance(constraint, dict) else constraint.model_dump(by_alias=True)
    text: str = convert_json_schema_to_str(plain)
    return text
