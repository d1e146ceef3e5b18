"""OpenAI request models: every field of chat completions and completions is either honoured or refused.

A field made with `_refused` accepts only the values that change nothing; any other value is answered with
`unsupported_parameter`. Unknown fields are refused by name. Null always equals absent (see `body`).

What this module does not do: look at the model (vocabulary, context) or the deployment's limits; see `jobs`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from serve_app.protocol.messages import Message, Wire
from serve_app.protocol.tools import NamedToolChoice, Tool, check_names

MAX_STOPS = 4
MAX_STOP_CHARS = 512
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKENS = 64
MAX_TOOLS = 128


def _few(limit: int) -> BeforeValidator:
    """Refuses a larger map before it looks at the entries, as pydantic does with lists."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} entries")
        return value

    return BeforeValidator(check)


def _boolean(value: Any) -> Any:
    """Python's 0 equals False, which is enough for a literal."""
    if not isinstance(value, bool):
        raise ValueError("must be false")
    return value


Off = Annotated[Literal[False], BeforeValidator(_boolean)]
Short = Annotated[str, Field(max_length=512)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(check_names)]
KwargName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateKwargs = Annotated[dict[KwargName, bool | int | float | Short], Field(max_length=16), _few(16)]


def _refused(why: str) -> Any:
    return Field(None, description=f"Not offered: {why}.", json_schema_extra={"x-unsupported": True})


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Off | None = None


class TextFormat(Wire):
    type: Literal["text"]


class JsonObjectFormat(Wire):
    type: Literal["json_object"]


class JsonSchema(Wire):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Short | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Accepted, not used: the schema always holds.")


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Wire):
    """Fields that chat completions and completions share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
            _few(MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Short | None = Field(None, description="Accepted, not used.")
    # OpenAI has these for chats alone, but they are about any request.
    metadata: Annotated[dict[str, Short], Field(max_length=16), _few(16)] | None = Field(
        None, description="Accepted, not used."
    )
    safety_identifier: Short | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: Short | None = Field(None, description="Accepted, not used.")
    service_tier: Literal["auto", "default"] | None = _refused("there is one tier; auto and default name it")
    store: Off | None = _refused("nothing is stored")
    moderation: None = _refused("there is no moderation")
    prompt_cache_options: None = _refused("the prompt cache has no per-request control")
    prompt_cache_retention: None = _refused("the prompt cache has no per-request control")
    # Extensions that most open engines share.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 and -1 are off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # Logits are divided by it: near zero they would overflow float32.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`. Without a token limit the answer may fill the context."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Newer name of max_tokens; both may be given only if they agree."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="Needs logprobs: true.")
    chat_template_kwargs: TemplateKwargs | None = Field(None, description="Scalars handed to the chat template.")
    response_format: ResponseFormat | None = Field(None, description="Other than text needs an engine with grammars.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = _refused("only text")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Other than none needs an engine that tells reasoning apart."
    )
    separate_reasoning: bool | None = Field(None, description="false leaves reasoning in the content.")
    verbosity: Literal["medium"] | None = _refused("the model has no such control")
    tools: Tools | None = Field(None, description="Needs an engine with a tool parser, as the two fields below.")
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = _refused("tools has taken its place")
    function_call: Literal["none", "auto"] | None = _refused("tool_choice has taken its place")
    audio: None = _refused("only text")
    prediction: None = _refused("drafts come from the drafter")
    web_search_options: None = _refused("there is no web search")


Prompt = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)
    ]
)


class CompletionRequest(Sampling):
    """`POST /v1/completions`. `max_tokens` is 16 unless given, as at OpenAI."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Only the value of n.")
    echo: Off | None = _refused("the prompt is not scored")
    suffix: Literal[""] | None = _refused("the model does not infill")


class TokenizeRequest(Wire):
    """`POST /tokenize`: exactly one of `prompt` and `messages`; `tools` with these."""

    model: Short | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class DetokenizeRequest(Wire):
    """`POST /detokenize`."""

    model: Short | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
