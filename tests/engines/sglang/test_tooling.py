"""A chat with tools as it is put to SGLang: its prompt, its grammar, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import SglangConfig, load_config
from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.engines.local.prompts import PromptRenderer
from serve_app.engines.sglang.arguments import server_arguments
from serve_app.engines.sglang.loading import prepare
from serve_app.engines.sglang.tooling import Plan, check_parsers, has_grammars
from serve_app.errors import ConfigError, InvalidRequest, Unsupported
from tests.engines.local.conftest import TEMPLATE as NO_TOOLS
from tests.engines.sglang.parsers import TOOLS, Rig, tool, write_marked

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def path(sglang_on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_marked(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def compiled(path: Path) -> Callable[[Rig, Plan], Callable[[str], bool]]:
    """A plan's grammar, by SGLang's own backend of the rig's name: whether a text is a whole answer."""
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    def compile_plan(rig: Rig, plan: Plan) -> Callable[[str], bool]:
        ((kind, text),) = plan.grammar.items()
        size = len(rig.tokenizer)
        if rig.backend == "xgrammar":
            backend: Any = XGrammarGrammarBackend(rig.tokenizer, vocab_size=size, model_eos_token_ids=[2])
        else:
            backend = GuidanceBackend(rig.tokenizer, n_vocab=size, eos_token_ids=[2])
        dispatch = {"structural_tag": backend.dispatch_structural_tag, "json_schema": backend.dispatch_json}
        grammar = dispatch[kind](text)
        assert hasattr(grammar, "accept_token"), grammar

        def accepts(answer: str) -> bool:
            one = grammar.copy()
            try:
                for token in [*rig.ids(answer), 2]:
                    one.accept_token(token)
            except ValueError:
                return False
            return True

        return accepts

    return compile_plan


def tags(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name":"{name}", "arguments":{arguments}}}\n</tool_call>'


def section(name: str, arguments: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def array(name: str, arguments: str) -> str:
    return f'[{{"name": "{name}", "parameters": {arguments}}}]'


FORMATS = [
    ("qwen", "xgrammar", tags),
    ("kimi_k2", "xgrammar", section),
    ("glm45", "xgrammar", array),
    ("qwen", "llguidance", array),
    ("kimi_k2", "llguidance", array),
]


@pytest.mark.parametrize(("parser", "backend", "written"), FORMATS)
@pytest.mark.parametrize("named", [None, "weather"])
def test_an_answer_that_must_call_is_held_to_what_is_read_as_a_call(
    path: Path,
    compiled: Callable[[Rig, Plan], Callable[[str], bool]],
    parser: str,
    backend: str,
    written: Callable[[str, str], str],
    named: str | None,
) -> None:
    rig = Rig(path, parser, backend=backend)
    plan = rig.plan(tool_choice="required", named_tool=named)
    accepts = compiled(rig, plan)
    good = written("weather", '{"city": "x"}')
    assert accepts(good) and rig.told(plan, good).called == [("weather", {"city": "x"})]
    assert not accepts("") and not accepts("Hello.")
    assert not accepts(written("nope", "{}")) and not accepts(written("weather", "5"))
    assert accepts(written("now", "{}")) == (named is None)


@pytest.mark.parametrize(("parser", "backend", "written"), FORMATS[:2])
def test_strict_arguments_follow_their_schema_where_a_call_may_come(
    path: Path,
    compiled: Callable[[Rig, Plan], Callable[[str], bool]],
    parser: str,
    backend: str,
    written: Callable[[str, str], str],
) -> None:
    rig = Rig(path, parser, backend=backend)
    strict = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
    accepts = compiled(rig, rig.plan(tools=(strict, tool("now"))))
    assert accepts("Hello.") and accepts(written("weather", '{"city": "x"}')) and accepts(written("now", '{"a": 1}'))
    assert not accepts(written("weather", '{"town": "x"}'))


def test_calls_that_may_come_are_held_to_nothing(path: Path) -> None:
    assert Rig(path, "qwen").plan().grammar == {}


@pytest.mark.parametrize(
    ("parser", "backend"), [("glm45", "xgrammar"), ("kimi_k2", "llguidance"), ("qwen", "llguidance")]
)
def test_strict_is_refused_where_nothing_could_hold_to_it(path: Path, parser: str, backend: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Rig(path, parser, backend=backend).plan(tools=(tool("now"), tool("weather", strict=True)))
    assert caught.value.param == "tools[1].function.strict"


def rendered(rig: Rig, plan: Plan) -> str:
    return str(rig.tokenizer.decode(PromptRenderer(rig.tokenizer, 1000).encode(plan.prompt)))


def test_the_template_sees_the_tools(path: Path) -> None:
    rig = Rig(path, "qwen")
    assert all(f'"name": "{name}"' in rendered(rig, rig.plan()) for name in ("weather", "now"))
    assert "weather" not in rendered(rig, rig.plan(tool_choice="required", named_tool="now"))
    assert "now" not in rendered(rig, rig.plan(tools=None))


def test_types_of_other_languages_are_put_right(path: Path) -> None:
    rig = Rig(path, "qwen")
    odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "bigint"}}}}}
    plan = rig.plan(tools=(odd,))
    assert plan.prompt.tools is not None
    assert plan.prompt.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
    }
    assert "type" not in odd["function"]["parameters"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": (tool("now"), tool("f", x={"type": 5}))}, "tools[1].function.parameters"),
        ({"tools": (tool("f", x={"maximum": 2**64}),)}, "tools[0].function.parameters"),
        ({"chat_template_kwargs": {"reasoning_effort": True}}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_is_named(path: Path, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Rig(path, "qwen", "qwen3").plan(**fields)
    assert caught.value.param == param


def test_definitions_that_differ_are_refused(path: Path) -> None:
    def defined(name: str, kind: str) -> dict[str, Any]:
        made = tool(name, strict=True)
        made["function"]["parameters"]["$defs"] = {"d": {"type": kind}}
        return made

    for backend in ("llguidance", "xgrammar"):
        with pytest.raises(InvalidRequest) as caught:
            Rig(path, "qwen", backend=backend).plan(
                tools=(defined("f", "string"), defined("g", "null")), tool_choice="required"
            )
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("fields", "thinks", "prefix"),
    [
        ({}, True, "<|im_start|>assistant\n"),
        ({"reasoning_effort": "high"}, True, "<|im_start|>assistant\n"),
        ({"reasoning_effort": "none"}, False, "<think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, "<think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False, "<think>\n\n</think>\n\n"),
    ],
)
def test_reasoning_is_turned_on_and_off(path: Path, fields: dict[str, Any], thinks: bool, prefix: str) -> None:
    rig = Rig(path, None, "qwen3")
    plan = rig.plan(tools=None, **fields)
    assert plan.reasons == thinks and rendered(rig, plan).endswith(prefix)
    told = rig.told(plan, "Hi")
    assert (told.reasoning, told.content) == (("Hi", "") if thinks else ("", "Hi"))


def test_reasoning_that_cannot_be_turned_off_is_not_said_to_be(sglang_on_cpu: None, tmp_path: Path) -> None:
    always = NO_TOOLS.replace("<|im_start|>assistant\n", "<|im_start|>assistant\\n<think>\\n")
    rig = Rig(write_marked(tmp_path, always), None, "deepseek-r1")
    assert rig.plan(tools=None).reasons
    with pytest.raises(Unsupported) as caught:
        rig.plan(tools=None, reasoning_effort="none")
    assert caught.value.param == "reasoning_effort"


def test_logprobs_of_reasoning_are_refused(path: Path) -> None:
    rig = Rig(path, None, "qwen3")
    with pytest.raises(Unsupported) as caught:
        rig.plan(tools=None, sampling=SamplingParams(logprobs=0))
    assert caught.value.param == "logprobs"
    rig.plan(tools=None, sampling=SamplingParams(logprobs=0), reasoning_effort="none")
    rig.plan(tools=None, sampling=SamplingParams(logprobs=0), separate_reasoning=False)


def test_reasoning_may_stay_in_the_text(path: Path) -> None:
    plan = Rig(path, None, "qwen3").plan(tools=None, separate_reasoning=False)
    assert plan.read is None and plan.reasons


def test_an_answer_with_a_grammar_is_not_continued(path: Path) -> None:
    rig = Rig(path, "qwen")
    with pytest.raises(Unsupported) as caught:
        rig.plan(tool_choice="required", emitted=(5,))
    assert caught.value.param == "emitted"
    assert rig.plan(emitted=(5,)).read is not None


def test_a_plain_prompt_is_left_alone(path: Path) -> None:
    request = GenerateRequest("r", SamplingParams(), prompt="hi")
    assert Rig(path, "qwen", "qwen3").tooling.plan(request) == Plan(request)


def test_special_tokens_are_text_where_calls_are_made_of_them(path: Path) -> None:
    rig = Rig(path, "kimi_k2", "kimi_k2")
    assert rig.plan().spelled and not rig.plan(tools=None).spelled


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_that_sglang_does_not_have_is_refused_with_the_choices(key: str) -> None:
    with pytest.raises(ConfigError, match=r"SGLang has no nope; it has one, two") as caught:
        check_parsers(SglangConfig.model_validate({key: "nope"}), {"two", "one"}, {"two", "one"})
    assert caught.value.param == f"sglang.{key}"


def test_sglang_is_asked_for_its_parsers_before_anything_is_fetched(sglang_on_cpu: None) -> None:
    config = {"engine": {"kind": "sglang"}, "model": {"source": "/not/there"}, "sglang": {"tool_call_parser": "qwen2"}}
    with pytest.raises(ConfigError, match="hermes"):
        prepare(load_config(config, use_env=False))


def test_parsers_have_keys_of_their_own() -> None:
    tree: dict[str, Any] = {"engine": {"kind": "sglang"}, "sglang": {"tool_call_parser": "qwen", "server_args": {}}}
    made = server_arguments(load_config(tree, use_env=False), Path("/t"), None, {"tool_call_parser"})
    assert made["tool_call_parser"] == "qwen" and "reasoning_parser" not in made
    tree["sglang"]["server_args"] = {"tool_call_parser": "qwen"}
    with pytest.raises(ConfigError, match=r"decided by sglang\.tool_call_parser"):
        server_arguments(load_config(tree, use_env=False), Path("/t"), None, {"tool_call_parser"})


def test_a_template_without_tools_is_no_start(sglang_on_cpu: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no tools") as caught:
        Rig(write_marked(tmp_path, NO_TOOLS), "qwen")
    assert caught.value.param == "sglang.tool_call_parser"


def test_prompts_that_sglang_encodes_itself_are_no_start(path: Path) -> None:
    with pytest.raises(ConfigError, match="dsv32"):
        Rig(path, "deepseekv32")


def test_the_schema_of_an_array_is_sglangs_own_but_for_what_is_no_call(path: Path) -> None:
    schema = json.loads(Rig(path, "qwen", backend="llguidance").plan(tool_choice="required").grammar["json_schema"])
    names = [entry["properties"]["name"]["enum"] for entry in schema["items"]["anyOf"]]
    assert names == [[t["function"]["name"]] for t in TOOLS] and schema["minItems"] == 1


def test_a_grammar_waits_for_the_end_of_reasoning(path: Path) -> None:
    """In SGLang's own wrapper of the backend, which its scheduler makes with a reasoning parser."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    rig = Rig(path, "qwen", "qwen3")
    plan = rig.plan(tool_choice="required")
    ((kind, text),) = plan.grammar.items()
    plain = XGrammarGrammarBackend(rig.tokenizer, vocab_size=len(rig.tokenizer), model_eos_token_ids=[2])
    waiting = ReasonerGrammarBackend(plain, ReasoningParser("qwen3"), rig.tokenizer)

    def accepts(answer: str) -> bool:
        grammar = waiting._init_value_dispatch((kind, text), plan.reasons)
        try:
            for token in [*rig.ids(answer), 2]:
                grammar.accept_token(token)
        except ValueError:
            return False
        return True

    good = "Let me see.</think>" + tags("now", "{}")
    assert accepts(good) and rig.told(plan, good).called == [("now", {})]
    assert not accepts("Let me see.</think>Hello.")


@pytest.mark.parametrize(
    ("backend", "reasoning", "grammars"),
    [("xgrammar", True, True), ("llguidance", True, False), ("llguidance", False, True), ("none", False, False)],
)
def test_which_backends_hold_answers_to_a_schema(backend: str, reasoning: bool, grammars: bool) -> None:
    assert has_grammars(backend, reasoning) == grammars
