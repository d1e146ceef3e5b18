"""Calls as each of SGLang's formats writes them, by its chat template or SGLang's own description of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Format = Callable[[Sequence[Call]], str]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """A string as it is, anything else as JSON: what the formats in XML do."""
    return value if isinstance(value, str) else dumps(value)


def wrapped(begin: str, each: Callable[[str, dict[str, Any]], str], between: str, end: str) -> Format:
    return lambda calls: begin + between.join(each(name, arguments) for name, arguments in calls) + end


def named(arguments: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, given: dumps({"name": name, arguments: given})


def xml(begin: str, each: str, end: str) -> Callable[[str, dict[str, Any]], str]:
    """A call of one element for each argument. `each` takes a key and a value, `begin` a name."""
    return lambda name, given: (
        begin.format(name) + "".join(each.format(key, plain(value)) for key, value in given.items()) + end
    )


def pythonic(name: str, given: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else dumps(value)


NS = "]<]minimax[>["


def minimax(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{NS}<{key}>{minimax(item)}{NS}</{key}>" for key, item in value.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{minimax(item)}{NS}</item>" for item in value)
    return plain(value)


def kimi(calls: Sequence[Call]) -> str:
    each = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    inner = "".join(each.format(name, index, dumps(given)) for index, (name, given) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def cohere(calls: Sequence[Call]) -> str:
    items = [
        dumps({"tool_call_id": str(index), "tool_name": name, "parameters": given})
        for index, (name, given) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(items) + "\n]<|END_ACTION|>"


HERMES = wrapped("<tool_call>\n", named("arguments"), "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
GLM = xml("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>")
QWEN_XML = xml("<tool_call>\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>")
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# By the parser's name.
FORMATS: dict[str, Format] = {
    "apertus2509": wrapped("<|tools_prefix|>[", lambda name, given: dumps({name: given}), ", ", "]<|tools_suffix|>"),
    "cohere_command4": cohere,
    "deepseekv3": wrapped(
        DEEPSEEK[0],
        lambda name, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given)}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        DEEPSEEK[1],
    ),
    "deepseekv31": wrapped(
        DEEPSEEK[0],
        lambda name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(given)}<｜tool▁call▁end｜>",
        "",
        DEEPSEEK[1],
    ),
    "gemma4": wrapped("", lambda name, given: f"<|tool_call>call:{name}{gemma(given)}<tool_call|>", "", ""),
    "gigachat3": wrapped("<|function_call|>", named("arguments"), "", ""),
    "glm45": wrapped("\n", GLM, "\n", ""),
    "glm47": wrapped(
        "", xml("<tool_call>{}", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"), "", ""
    ),
    "gpt-oss": wrapped(
        "",
        lambda name, given: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(given)}<|call|>"
        ),
        "",
        "",
    ),
    "hermes": HERMES,
    "hunyuan": wrapped(
        "<tool_calls>\n",
        xml(
            "<tool_call>{}<tool_sep>\n",
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
            "</tool_call>",
        ),
        "\n",
        "\n</tool_calls>",
    ),
    "interns1": wrapped(
        "", lambda *call: f"<|action_start|> <|plugin|>\n{named('parameters')(*call)}<|action_end|>", "\n", ""
    ),
    "kimi_k2": kimi,
    "lfm2": wrapped("<|tool_call_start|>[", pythonic, ", ", "]<|tool_call_end|>"),
    "llama3": wrapped("<|python_tag|>", named("parameters"), ";", ""),
    "mimo": wrapped(
        "", xml("<tool_call>\n<function={}>\n", "<parameter={}>{}</parameter>\n", "</function>\n</tool_call>"), "\n", ""
    ),
    "minicpm5": wrapped("", xml('<function name="{}">', '<param name="{}">{}</param>', "</function>"), "", ""),
    "minimax-m2": wrapped(
        "<minimax:tool_call>\n",
        xml('<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>"),
        "\n",
        "\n</minimax:tool_call>",
    ),
    "minimax-m3": wrapped(
        f"{NS}<tool_call>\n",
        lambda name, given: f'{NS}<invoke name="{name}">{minimax(given)}{NS}</invoke>',
        "\n",
        f"\n{NS}</tool_call>",
    ),
    "mistral": wrapped("[TOOL_CALLS] [", named("arguments"), ", ", "]"),
    "mistral compact": wrapped("", lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}", "", ""),
    "poolside_v1": wrapped("", GLM, "\n", ""),
    "pythonic": wrapped("[", pythonic, ", ", "]"),
    "qwen": HERMES,
    "qwen3_coder": wrapped("", QWEN_XML, "\n", ""),
    "step3": wrapped(
        "<｜tool_calls_begin｜>\n",
        lambda *call: (
            "<｜tool_call_begin｜>function<｜tool_sep｜>"
            + xml(
                '<steptml:invoke name="{}">', '<steptml:parameter name="{}">{}</steptml:parameter>', "</steptml:invoke>"
            )(*call)
            + "<｜tool_call_end｜>"
        ),
        "\n",
        "\n<｜tool_calls_end｜>",
    ),
    "step3p5": wrapped("", QWEN_XML, "\n", ""),
    "trinity": HERMES,
}
