"""One frozen configuration tree: defaults < YAML file < environment < builder arguments. Unknown keys are errors.

Environment: `DDTREE_CONFIG=/path/to.yaml`, and one variable per key, `DDTREE_` plus the dotted path with `__`
between levels: `DDTREE_MODEL__SOURCE=/models/x`, `DDTREE_SPECULATION__BUDGET=32`. Values are YAML scalars.

This module reads files and the environment and nothing else; "auto" values are resolved by who owns the fact
(the engine knows its device), not here.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from serve_app.errors import ConfigError

ENV_PREFIX = "DDTREE_"
ENV_FILE = "DDTREE_CONFIG"
# Read elsewhere, before any configuration exists; not keys of the tree.
ENV_OTHERS = frozenset({ENV_FILE, "DDTREE_CACHE"})


# Calls that a replica may have at once: at least, and beside what its engine takes (readiness probes, /tokenize).
LEAST_ONGOING, OTHER_CALLS = 512, 64
# What outlives it (`proxy.switches`) must be a time that HAProxy can count, 24 days in milliseconds.
MAX_REQUEST_S = 7 * 86400


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's yes, no, on and off are booleans, which pydantic takes for the numbers 1 and 0."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation) if isinstance(value, bool) else set()
        if kinds & {int, float} and bool not in kinds:
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """What an annotation is made of."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


class ModelConfig(_Frozen):
    """Which model is served, under which name.

    `source` is a known name (`python -m serve_app.models list`), a local directory, or a Hugging Face id.
    `drafter` likewise: "auto" takes the shipped drafter made for the source if there is one, null drafts nothing.
    """

    id: str = Field("smollm2-135m", min_length=1, max_length=200, pattern=r"^[^\s?#]+$")
    source: str = Field("smollm2-135m", min_length=1)
    drafter: str | None = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    context_length: int | None = Field(None, ge=16)


class SpeculationConfig(_Frozen):
    """How drafts are made. `method`: `ddtree` verifies a draft tree, `chain` the drafter's argmax block, `none`
    one token a step. `budget`: tree nodes without the root, "auto" for what measured best on the device and batch.
    `top_k`: candidates per depth. `spine_first`: the whole top-1 chain is in every tree, the rest is best first."""

    method: Literal["ddtree", "chain", "none"] = "ddtree"
    budget: int | Literal["auto"] = "auto"
    top_k: int = Field(8, ge=1, le=64)
    spine_first: bool = False

    @field_validator("budget")
    @classmethod
    def _budget_in_range(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 0 <= value <= 512:
            raise ValueError("must be from 0 to 512, or auto")
        return value


class EngineConfig(_Frozen):
    """`kind`: `local` is the embedded engine, `sglang` is SGLang with the DDTREE plugin. `max_running`: KV slots, the
    largest batch. `max_queued`: requests that may wait for a slot before new ones are refused. `prefill_chunk`: prompt
    tokens per step. `threads`: CPU threads. The last two are the embedded engine's alone."""

    kind: Literal["local", "sglang"] = "local"
    max_running: int = Field(8, ge=1, le=256)
    max_queued: int = Field(256, ge=0)
    prefill_chunk: int = Field(512, ge=16)
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    cuda_graphs: bool = True


class SglangConfig(_Frozen):
    """What SGLang is started with, where `engine.kind` is `sglang`. `tp_size`: GPUs that share the model, "auto" for
    `replica.num_gpus`. Null leaves the choice to SGLang; DDTREE then takes triton for attention. `tool_call_parser`,
    `reasoning_parser`: SGLang's names of the formats in which the model calls tools and reasons, null for neither.
    `prefill_graphs`: "full" replays a prompt's layers as one graph, "auto" as SGLang chooses (breakable graphs).
    `server_args`: any other field of SGLang's ServerArgs by its name, checked when the engine starts."""

    tp_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    attention_backend: str | None = None
    page_size: int | None = Field(None, ge=1)
    mem_fraction_static: float | None = Field(None, gt=0, lt=1)
    prefill_graphs: Literal["auto", "full"] = "auto"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    server_args: dict[str, Any] = {}


class ReplicaConfig(_Frozen):
    """The deployment that owns an engine. Seconds throughout. Serve checks thrice in a `health_check_period_s` and ends
    a replica after three failures in a row: one that no longer answers after a third of a period and three timeouts,
    one whose engine is stuck after `stuck_after_s` and two periods. `warmup_grace_s`: after its start an engine may
    take longer than that. `max_ongoing_requests`: calls of all kinds, "auto" for `Config.max_ongoing_requests`."""

    num_replicas: int = Field(1, ge=1, le=1024)
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)
    max_ongoing_requests: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    health_check_period_s: float = Field(3, gt=0)
    health_check_timeout_s: float = Field(6, gt=0)
    stuck_after_s: float = Field(10, gt=0)
    warmup_grace_s: float = Field(60, ge=0)
    graceful_shutdown_timeout_s: float = Field(30, ge=0)
    max_constructor_retry_count: int = Field(3, ge=1)

    @property
    def first_token_s(self) -> float:
        """How long an engine has for the first token of its life."""
        return max(self.stuck_after_s, self.warmup_grace_s)


class PlacementConfig(_Frozen):
    """Where replicas go, and what a node must be. `whole_node`: a replica takes one whole node, through one
    placement-group bundle where it has GPUs (`replica.num_gpus` is then all of a node's), never two on a node.
    `accelerator_type`, `node_labels`: which nodes qualify. `preflight`: each replica first checks its node against the
    keys below (`serve_app.topology`). `gpu_name`: part of every GPU's name, else the accelerator type is.
    `nvlink`: it must join every pair. `local_model`: the source must be a directory on the node. Sizes in GiB free."""

    whole_node: bool = False
    accelerator_type: str | None = None
    node_labels: dict[str, str] = {}
    preflight: bool = False
    gpu_name: str | None = None
    nvlink: bool = True
    min_gpu_free_gib: float = Field(0, ge=0)
    min_driver: str | None = Field(None, pattern=r"^\d+(\.\d+)*$")
    min_cuda: str | None = Field(None, pattern=r"^\d+(\.\d+)*$")
    min_memory_gib: float = Field(0, ge=0)
    min_shm_gib: float = Field(0, ge=0)
    local_model: bool = False


class AutoscalingConfig(_Frozen):
    """The number of replicas follows the load when `max_replicas` is set; `replica.num_replicas` is then the number at
    first. `target_busy`: the share of its slots, or of its KV memory, that each should use. `target_ttft_s`: while
    first tokens take longer (those of nine requests in ten, at the replica) there are to be more; null for no such
    target. Delays: how long the load must say so. A replica that goes finishes its streams within
    `replica.graceful_shutdown_timeout_s`."""

    max_replicas: int | None = Field(None, ge=1)
    min_replicas: int = Field(1, ge=1)
    target_busy: float = Field(0.7, gt=0, le=1)
    target_ttft_s: float | None = Field(None, gt=0)
    look_back_s: float = Field(10, gt=0)
    upscale_delay_s: float = Field(15, ge=0)
    downscale_delay_s: float = Field(300, ge=0)


class RoutingConfig(_Frozen):
    """How an ingress chooses a replica. `prefix`: the one that was sent most of the prompt before, unless it has more
    than `slack` (a share of the mean) more to do than its peers; `power_of_two`: the less loaded of two. Each ingress
    remembers `max_blocks` blocks of `block_chars` characters. A replica that leaves a request unanswered for
    `suspect_s` gets no other."""

    policy: Literal["prefix", "power_of_two"] = "prefix"
    slack: float = Field(0.5, ge=0, le=10)
    max_blocks: int = Field(65536, ge=1)
    block_chars: int = Field(256, ge=16)
    suspect_s: float = Field(2, gt=0)


class IngressConfig(_Frozen):
    """HTTP limits; a request over one is refused with the field's name. A body must fit one message between Serve's
    processes, 4 MB when they speak gRPC. `request_timeout_s` bounds a whole answer; a client may ask for less with
    the header x-request-timeout-seconds. `resume`: which answers go on elsewhere when their replica is lost after
    tokens were sent; one request may lose at most `max_resumes` + 1 replicas. `channel`: items of all streams
    between an ingress and a replica share a connection of their own, rather than each having a call of Serve's."""

    num_replicas: int = Field(1, ge=1)
    max_ongoing_requests: int = Field(1024, ge=1)
    channel: bool = True
    max_body_bytes: int = Field(3 * 1024 * 1024, ge=1024)
    max_messages: int = Field(2048, ge=1)
    max_choices: int = Field(16, ge=1)
    max_prompts: int = Field(64, ge=1)
    request_timeout_s: float = Field(600, gt=0, le=MAX_REQUEST_S)
    resume: Literal["all", "greedy", "never"] = "all"
    max_resumes: int = Field(2, ge=0, le=16)
    ready_max_age_s: float = Field(30, gt=0)
    ready_timeout_s: float = Field(5, gt=0)


KEY_NAME = r"^[A-Za-z0-9._-]{1,64}$"


class ApiKey(_Frozen):
    """One API key, as its hash (`python -m serve_app.admission NAME` makes both). Null limits are none. `models`: ids
    that it may use, null for all. `priority`: batch requests wait until no interactive one does."""

    name: str = Field(pattern=KEY_NAME)
    hash: str = Field(repr=False)
    models: list[str] | None = None
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    max_concurrent: int | None = Field(None, ge=1)
    priority: Literal["interactive", "batch"] = "interactive"

    @field_validator("hash")
    @classmethod
    def _hash_is_one(cls, value: str) -> str:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}|scrypt:([0-9a-f]{2}){8,64}:[0-9a-f]{64}", value):
            raise ValueError("must be sha256:… or scrypt:…, whole; python -m serve_app.admission NAME makes one")
        return value


class AdmissionConfig(_Frozen):
    """`keys`: with any, a request without one of them is refused. `max_concurrent`: requests that generate at once,
    null for any number; more wait, at most `max_queued`. All ingress processes together."""

    keys: list[ApiKey] = []
    max_concurrent: int | None = Field(None, ge=1)
    max_queued: int = Field(256, ge=0)

    @field_validator("keys")
    @classmethod
    def _keys_differ(cls, keys: list[ApiKey]) -> list[ApiKey]:
        for what in ("name", "hash"):
            if len({getattr(key, what) for key in keys}) < len(keys):
                raise ValueError(f"two keys have the same {what}")
        return keys


class MetricsConfig(_Frozen):
    """Each process exports on its own port, where 0 picks a free one. `host`: the address it binds, "auto" is the
    node's. A process that missed three heartbeats is gone from /metrics."""

    port: int = Field(0, ge=0, le=65535)
    host: str = "auto"
    heartbeat_s: float = Field(2, gt=0)
    scrape_timeout_s: float = Field(1, gt=0)


class LogConfig(_Frozen):
    """`format`: of every process's log. `prompts`: log prompts too, which by default no line contains."""

    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    prompts: bool = False


class TracingConfig(_Frozen):
    """`endpoint`: base URL of an OTLP collector over HTTP, null for no tracing. `sample_ratio`: share of the traces
    that begin here; a client's own decision is kept."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    sample_ratio: float = Field(1, ge=0, le=1)
    service_name: str = Field("ddtree-serve", min_length=1)


class Config(_Frozen):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    engine: EngineConfig = EngineConfig()
    sglang: SglangConfig = SglangConfig()
    replica: ReplicaConfig = ReplicaConfig()
    placement: PlacementConfig = PlacementConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    routing: RoutingConfig = RoutingConfig()
    ingress: IngressConfig = IngressConfig()
    admission: AdmissionConfig = AdmissionConfig()
    metrics: MetricsConfig = MetricsConfig()
    logging: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    @property
    def max_ongoing_requests(self) -> int:
        """Calls that Serve lets a replica have at once; more wait at the ingress. With no more of them than the engine
        runs and queues, a full engine would refuse nobody, and readiness probes would wait for an answer to end."""
        asked = self.replica.max_ongoing_requests
        if asked != "auto":
            return asked
        return max(LEAST_ONGOING, self.engine.max_running + self.engine.max_queued + OTHER_CALLS)

    @model_validator(mode="after")
    def _speculation_needs_drafter(self) -> Config:
        if self.model.drafter is None and self.speculation.method == "chain":
            raise ValueError("speculation.method chain needs model.drafter")
        return self

    @model_validator(mode="after")
    def _keys_belong_to_the_engine(self) -> Config:
        if self.engine.kind == "local" and self.sglang.model_fields_set:
            raise ValueError("sglang needs engine.kind sglang")
        foreign = {"prefill_chunk", "threads"} & self.engine.model_fields_set if self.engine.kind == "sglang" else set()
        if foreign:
            raise ValueError(f"engine.{min(foreign)} is the embedded engine's; SGLang has sglang.server_args")
        return self

    @model_validator(mode="after")
    def _full_prefill_graphs_are_graphs(self) -> Config:
        if self.sglang.prefill_graphs == "full" and not self.engine.cuda_graphs:
            raise ValueError("sglang.prefill_graphs full needs engine.cuda_graphs")
        return self

    @model_validator(mode="after")
    def _first_number_is_within_bounds(self) -> Config:
        scaling = self.autoscaling
        if scaling.max_replicas is not None and not (
            scaling.min_replicas <= self.replica.num_replicas <= scaling.max_replicas
        ):
            raise ValueError("replica.num_replicas must lie between autoscaling.min_replicas and max_replicas")
        return self

    @model_validator(mode="after")
    def _selection_needs_a_bundle(self) -> Config:
        placement, gpus = self.placement, self.replica.num_gpus
        selects = placement.accelerator_type is not None or placement.node_labels
        if selects and not (placement.whole_node and gpus):
            raise ValueError("placement.accelerator_type and node_labels need whole_node and replica.num_gpus")
        if placement.whole_node and gpus != int(gpus):
            raise ValueError("placement.whole_node needs a whole number of replica.num_gpus")
        return self


def load_config(
    args: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, *, use_env: bool = True
) -> Config:
    """Build the tree from a YAML file, the environment and builder arguments, later ones winning.

    Raises:
        ConfigError: `param` is the dotted path of the first wrong key; the message lists every one.
    """
    env = dict(os.environ if env is None else env) if use_env or env is not None else {}
    path = env.get(ENV_FILE)
    file = _read_yaml(Path(path)) if path else {}
    tree: dict[str, Any] = {}
    for source in (file, _from_env(env), dict(args or {})):
        _merge(tree, source)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [(*_place(e["loc"]), _said(e)) for e in error.errors()]

        def origin(key: str) -> str:
            if _has(args or {}, key):
                return ""
            variable = _variable(key, env)
            return f" (from {variable})" if variable else f" (from {path})" if _has(file, key) else ""

        text = "; ".join(f"{where or 'config'}{origin(key)}: {what}" for where, key, what in problems)
        raise ConfigError(f"invalid configuration: {text}", param=problems[0][0] or None) from None


def _place(location: Sequence[int | str]) -> tuple[str, str]:
    """Where in the tree, with the item of a list and its field (`admission.keys[0].hash`), and the key alone."""
    # A key has two levels; what follows is an item of a list, or names a branch of the key's type.
    key, rest = ".".join(map(str, location[:2])), location[2:4]
    if not rest or not isinstance(rest[0], int):
        return key, key
    return "".join((f"{key}[{rest[0]}]", *(f".{name}" for name in rest[1:]))), key


def _said(problem: Any) -> str:
    """One finding of pydantic's, in the words of somebody who never heard of it."""
    if problem["type"] == "extra_forbidden":
        return "unknown key (docs/configuration.md lists them)"
    message = str(problem["msg"]).removeprefix("Value error, ")
    for opening in ("Input should", "String should"):
        message = message.replace(opening, "must")
    return message


def _variable(key: str, env: Mapping[str, str]) -> str | None:
    """The environment variable that set a key, if one did."""
    variable = ENV_PREFIX + key.upper().replace(".", "__")
    named = [name for name in env if name == variable or name.startswith(variable + "__")]
    return named[0] if key and named else None


def _has(tree: Mapping[str, Any], key: str) -> bool:
    """Whether a source sets a key; of the whole tree ("") none is the source."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        data, twice = yaml.safe_load(text), _twice(yaml.compose(text, yaml.SafeLoader), "", set())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # On one line, though YAML's own words draw where they mean.
        said = " ".join(str(error).split())
        raise ConfigError(f"cannot read configuration file {path}: {said}", param=ENV_FILE) from None
    if twice:
        # YAML itself would forget the first.
        raise ConfigError(f"{twice} is there twice in {path}", param=twice)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"configuration file {path} must hold a mapping", param=ENV_FILE)
    if "applications" in data:
        what = f"{path} configures Serve: `serve run {path}`; {ENV_FILE} takes a file of what is under its `args`"
        raise ConfigError(what, param=ENV_FILE)
    return data


def _twice(node: yaml.Node | None, path: str, known: set[int]) -> str | None:
    """The path of the first key that a mapping has twice. `known`: nodes that were looked at; aliases lead back to
    them."""
    if id(node) in known or not isinstance(node, yaml.CollectionNode):
        return None
    known.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        below = [(f"{path}[{index}]", child) for index, child in enumerate(node.value)]
    else:
        below = [(f"{path}.{key.value}".removeprefix("."), child) for key, child in node.value]
    counts = Counter(name for name, _ in below)
    own = next((name for name, count in counts.items() if count > 1), None)
    return own or next((found for name, child in below if (found := _twice(child, name, known))), None)


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in ENV_OTHERS:
            continue
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"environment variable {name} is not a YAML value", param=name) from None
        node: dict[str, Any] = {keys[-1]: value}
        for key in reversed(keys[:-1]):
            node = {key: node}
        _merge(tree, node)
    return tree


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
