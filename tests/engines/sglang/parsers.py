"""SGLang's parsers as the engine has them, over a byte tokenizer whose added tokens are the formats' marks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.engines.local.detokenizer import make_detokenizer
from serve_app.engines.local.stopping import TextStream
from serve_app.engines.local.vocabulary import Vocabulary
from serve_app.engines.sglang.parsed import ParsedStream
from serve_app.engines.sglang.reading import Said
from serve_app.engines.sglang.tooling import Plan, Tooling
from tests.engines.local.conftest import write_tokenizer

# Tokens of their own in the models that use them; those of Qwen and of reasoning are no special tokens there.
PLAIN_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL_MARKS = [
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
    "<|call|>",
]
TEMPLATE = (
    "{% if not enable_thinking is defined %}{% set enable_thinking = true %}{% endif %}"
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
END = 2


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": {"type": "object", "properties": properties}}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


TOOLS = (tool("weather", city={"type": "string"}), tool("now"))


def write_marked(path: Path, template: str = TEMPLATE) -> Path:
    """A tokenizer: one token a byte, and one for each mark."""
    write_tokenizer(path)
    made = AutoTokenizer.from_pretrained(path)
    made.add_tokens(PLAIN_MARKS)
    made.add_tokens(SPECIAL_MARKS, special_tokens=True)
    made.chat_template = template
    made.save_pretrained(path)
    return path


@dataclass
class Told:
    """What a client has of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    finish: str | None = None
    reasoning_tokens: int | None = None

    def add(self, stream: ParsedStream | Said, content: str) -> None:
        delta = stream.delta() or {}
        self.content += content
        self.reasoning += delta.get("reasoning_content", "")
        for entry in delta.get("tool_calls", ()):
            if "id" in entry:
                assert entry["type"] == "function" and entry["index"] == len(self.calls)
                self.calls[entry["index"]] = [entry["function"]["name"], ""]
                self.ids.append(entry["id"])
            self.calls[entry["index"]][1] += entry["function"]["arguments"]

    @property
    def called(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls.values()]


class Rig:
    """The parsers of one engine.

    Args:
        path: where `write_marked` was.
    """

    def __init__(self, path: Path, tools: str | None, reasoning: str | None = None, backend: str = "xgrammar") -> None:
        from sglang.srt.parser.template_manager import TemplateManager

        self.tokenizer, self.backend = AutoTokenizer.from_pretrained(path), backend
        arguments = SimpleNamespace(
            tool_call_parser=tools, reasoning_parser=reasoning, default_chat_template_kwargs=None,
            grammar_backend=backend, tokenizer_metrics_allowed_custom_labels=None,
        )  # fmt: skip
        model = SimpleNamespace(
            get_default_sampling_params=dict,
            hf_config=SimpleNamespace(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
        )
        manager = SimpleNamespace(server_args=arguments, tokenizer=self.tokenizer, processor=None, model_config=model)
        templates = TemplateManager()
        templates.load_chat_template(manager, None, str(path))
        self.tooling = Tooling(manager, templates)
        self.vocabulary = Vocabulary(self.tokenizer)

    def plan(self, tools: Any = TOOLS, messages: Any = None, **fields: Any) -> Plan:
        asked = messages or [{"role": "user", "content": "hi"}]
        sampling = fields.pop("sampling", SamplingParams())
        return self.tooling.plan(GenerateRequest("r", sampling, messages=asked, tools=tools, **fields))

    def stream(
        self, plan: Plan, max_tokens: int = 10_000, ends: Collection[int] = (END,), **sampling: Any
    ) -> ParsedStream:
        assert plan.read is not None
        vocabulary = self.tooling.spelled if plan.spelled else self.vocabulary
        text = TextStream(SamplingParams(**sampling), make_detokenizer(vocabulary), max_tokens, ends)
        return ParsedStream(text, plan.read())

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def read(self, plan: Plan, pieces: Iterable[str]) -> Told:
        """What is told of an answer whose tokens are these pieces of it."""
        assert plan.read is not None
        reader, told = plan.read(), Told()
        for piece in pieces:
            reader.push(piece)
            said = reader.take()
            told.add(said, said.content)
        reader.end()
        said = reader.take()
        told.add(said, said.content)
        return told

    def told(
        self, plan: Plan, text: str | list[int], cut: int = 0, block: int = 0, end: bool = True, **sampling: Any
    ) -> Told:
        """What is told of an answer: its first `cut` tokens by one replica, the rest by another, in blocks."""
        tokens = [*self.ids(text), *([END] if end else [])] if isinstance(text, str) else text
        told = Told()
        emitted: list[int] = []
        for part in (tokens[:cut], tokens[cut:]):
            stream = self.stream(plan, **sampling)
            stream.resume(emitted)
            step = block or max(1, len(part))
            for at in range(0, len(part), step):
                _, content, ending = stream.push(part[at : at + step])
                told.add(stream, content)
                if ending is not None:
                    told.finish, told.reasoning_tokens = ending.reason, stream.reasoning_tokens
                    return told
            emitted = part
        return told
