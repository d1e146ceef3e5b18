"""The laptop model with a chat template that has tools: its own has none.

Chats without tools are rendered as before. The format of calls is Qwen's, which SGLang's parser `qwen` reads.

What this module does not do: make the model good at calling them.
"""

from __future__ import annotations

import json
from pathlib import Path

PARSER = "qwen"
_CONFIG = "tokenizer_config.json"
_ASK = (
    "You may call these functions:\n{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
    'To call one, answer with <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
)
_CALLS = (
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "\n</tool_call>{% endfor %}"
)


def with_tools(model: Path, into: Path) -> Path:
    """A directory with the model's files and the other template; `into`, which is made.

    Raises:
        ValueError: the model's template is not the laptop model's.
    """
    config = json.loads((model / _CONFIG).read_text())
    config["chat_template"] = template(config.get("chat_template") or "")
    into.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = into / file.name
        if file.name != _CONFIG and not link.exists():
            link.symlink_to(file.resolve())
    (into / _CONFIG).write_text(json.dumps(config))
    return into


def template(plain: str) -> str:
    """Tools in front of the messages, calls behind the content of one."""
    content = "message['content']"
    if plain.count(content) != 1 or "tools" in plain:
        raise ValueError("the chat template is not the one that is known here")
    asks = "{% if tools %}<|im_start|>system\n" + _ASK + "<|im_end|>\n{% endif %}"
    return asks + plain.replace(f"{content} + ", f"{content}}}}}{_CALLS}{{{{")
