"""`python -m serve_app.capacity kimi-k2.6 …`: from model shape, GPUs, acceptance and step time to memory and rates.

Memory is arithmetic over shapes; speed is not predicted: acceptance length and step time are yours to measure
(docs/sizing.md says how) and go in as they are. GiB are 2^30 bytes.

What this module does not do: read checkpoints or GPUs, or know that a step of a larger batch takes longer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

GIB = 1024**3
# Bytes per element of what the buffers below hold.
F32, BF16, INT64, BOOL = 4, 2, 8, 1


@dataclass(frozen=True, slots=True)
class Model:
    """A target with its drafter; `HELP` has each field. A latent cache replaces heads and is whole on every GPU; the
    drafter keeps keys and values of its own for every committed token."""

    weights: float
    layers: int
    hidden: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    draft_weights: float = 0.0
    draft_layers: int = 0
    draft_kv_heads: int = 0
    draft_head_dim: int = 0
    features: int = 5


# smollm2-135m and its drafter: this repository's. kimi-k2.6: published figures of Kimi K2.x (61 layers, latent rows
# of 512 + 64, 595 GB with int4 experts), and of a drafter published for K2.5 (6 layers, 8 K/V heads, 3.5e9 weights in
# bfloat16; its head size of 128 is assumed). Check them against config.json of what you serve.
MODELS = {
    "smollm2-135m": Model(
        weights=134.5e6 * BF16, layers=30, hidden=576, vocab=49152, kv_heads=3, head_dim=64,
        draft_weights=38.7e6, draft_layers=5, draft_kv_heads=3, draft_head_dim=64,
    ),
    "kimi-k2.6": Model(
        weights=595e9, layers=61, hidden=7168, vocab=163840, latent=512 + 64,
        draft_weights=3.5e9 * BF16, draft_layers=6, draft_kv_heads=8, draft_head_dim=128, features=6,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """One replica's GPUs and limits, how many replicas, and what was measured; `HELP` has each field."""

    gpus: int = 8
    gpu_gib: float = 268
    usable: float = 0.9
    replicas: int = 1
    budget: int = 32
    slots: int = 32
    context: int = 131072
    graphs_gib: float = 4
    tokens: int = 8192
    answer: int = 1024
    acceptance: float = 4
    step_ms: float = 40
    think_s: float = 30
    chunk_us: float = 600
    sampled: bool = True


# What each field above is, with its unit; `--help` shows it.
HELP = {
    "weights": "bytes of the target's files",
    "layers": "of the target",
    "hidden": "width of the target",
    "vocab": "tokens in the vocabulary",
    "kv_heads": "K/V heads of ordinary attention",
    "head_dim": "elements of a head",
    "latent": "elements per token and layer of latent attention (MLA), in the place of heads",
    "draft_weights": "bytes of the drafter's files",
    "draft_layers": "of the drafter",
    "draft_kv_heads": "K/V heads of the drafter",
    "draft_head_dim": "elements of a head of the drafter",
    "features": "target layers that the drafter reads",
    "gpus": "of one replica",
    "gpu_gib": "memory of each GPU, GiB",
    "usable": "share of it that may be filled",
    "replicas": "how many",
    "budget": "tree nodes without the root",
    "slots": "requests in the largest batch of a replica",
    "context": "longest prompt with its answer, tokens",
    "graphs_gib": "what captured graphs keep per GPU beside the buffers, GiB; yours to measure",
    "tokens": "prompt and answer of a typical request",
    "answer": "of those, generated",
    "acceptance": "tokens per verify step of one request, bonus included; yours to measure",
    "step_ms": "time of a verify step of a full batch, ms; yours to measure",
    "think_s": "pause of a user between an answer and the next question, s",
    "chunk_us": "CPU time of an ingress process per streamed chunk, µs",
    "sampled": "whether requests sample",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Of each GPU, GiB. `kv_tokens`: that fit into what is left, over the whole replica; negative left means no fit."""

    weights: float
    drafter: float
    graphs: float
    logits: float
    mask: float
    kv_indices: float
    features: float
    left: float
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """`running`: requests that decode at once, all replicas. `users`: people who read, think and ask again."""

    running: int
    tokens_per_s: float
    tokens_per_s_per_request: float
    itl_ms: float
    answer_s: float
    answers_per_s: float
    users: int
    ingress_cores: float
    ingress_replicas: int


def kv_bytes(model: Model, gpus: int) -> int:
    """Keys and values of one token on one GPU, target and drafter, bfloat16.

    Heads are spread over GPUs and never split; a latent cache is whole on each.
    """
    if model.latent:
        target = model.layers * model.latent * BF16
    else:
        target = 2 * model.layers * math.ceil(model.kv_heads / gpus) * model.head_dim * BF16
    return target + 2 * model.draft_layers * math.ceil(model.draft_kv_heads / gpus) * model.draft_head_dim * BF16


def logits_bytes(model: Model, plan: Plan) -> int:
    """Rows of a verify step times the vocabulary, float32: once, and four times more while sampling (scaled logits,
    sorted, probabilities, renormalised)."""
    return plan.slots * (plan.budget + 1) * model.vocab * F32 * (5 if plan.sampled else 1)


def mask_bytes(plan: Plan) -> int:
    """Each row's view of the whole context and of the tree; the buffer is allocated for the longest context."""
    rows = plan.budget + 1
    return plan.slots * rows * (plan.context + rows) * BOOL


def kv_indices_bytes(plan: Plan) -> int:
    """Triton's index of KV slots, one row per request: the plugin's, where SGLang's has one per verified row."""
    return plan.slots * plan.context * INT64


def features_bytes(model: Model, plan: Plan) -> int:
    """Hidden states of the layers that the drafter reads, for every verified row."""
    return plan.slots * (plan.budget + 1) * model.features * model.hidden * BF16


def memory(model: Model, plan: Plan) -> Memory:
    """What each GPU of a replica holds. Weights are spread evenly; the drafter is counted whole on each, its upper
    bound."""
    parts = {
        "weights": model.weights / plan.gpus,
        "drafter": model.draft_weights,
        "graphs": plan.graphs_gib * GIB,
        "logits": logits_bytes(model, plan),
        "mask": mask_bytes(plan),
        "kv_indices": kv_indices_bytes(plan),
        "features": features_bytes(model, plan),
    }
    left = plan.gpu_gib * plan.usable * GIB - sum(parts.values())
    return Memory(
        **{name: size / GIB for name, size in parts.items()},
        left=left / GIB,
        kv_tokens=max(0, int(left // kv_bytes(model, plan.gpus))),
    )


def rates(model: Model, plan: Plan) -> Rates:
    """What that serves, at full batches. A request occupies its answer's decode time; prefill is in step_ms or not at
    all."""
    fit = memory(model, plan).kv_tokens // (plan.tokens + plan.budget + 1)
    running = plan.replicas * min(plan.slots, fit)
    per_request = plan.acceptance / (plan.step_ms / 1000)
    answer_s = plan.answer / per_request
    answers = running / answer_s
    # One chunk per verify step and request; processes are planned for 60 % of a core.
    cores = running / (plan.step_ms / 1000) * plan.chunk_us / 1e6
    return Rates(
        running=running,
        tokens_per_s=running * per_request,
        tokens_per_s_per_request=per_request,
        itl_ms=1000 / per_request,
        answer_s=answer_s,
        answers_per_s=answers,
        users=int(answers * (answer_s + plan.think_s)),
        ingress_cores=cores,
        ingress_replicas=max(2, math.ceil(cores / 0.6)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints memory and rates; exit code 1 where nothing fits."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    given = {name: value for name, value in options.items() if value is not None}
    model = replace(MODELS[options["model"]], **_of(Model, given))
    plan = Plan(**_of(Plan, given))
    if wrong := [name for name in ("gpus", "slots", "step_ms", "acceptance", "tokens") if getattr(plan, name) <= 0]:
        parser.error(f"not positive: {', '.join(wrong)}")
    found = memory(model, plan)
    result: dict[str, Any] = {
        "memory_gib_per_gpu": asdict(found),
        "kv_bytes_per_token": kv_bytes(model, plan.gpus),
        "rates": asdict(rates(model, plan)),
    }
    print(json.dumps(result, indent=2) if options["json"] else _table(result))
    if found.kv_tokens < plan.tokens:
        print("not one request fits: more GPUs, a shorter context, or fewer slots", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """An option for every field of a model and a plan."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.capacity", description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS), help="a known shape, which the options below may change")
    parser.add_argument("--json", action="store_true", help="for scripts")
    shape = parser.add_argument_group("shape", "default: the known one's")
    plan = parser.add_argument_group("plan")
    for group, field in (*((shape, field) for field in fields(Model)), *((plan, field) for field in fields(Plan))):
        option = f"--{field.name.replace('_', '-')}"
        said = HELP[field.name] + (f" (default: {field.default})" if group is plan else "")
        if field.type == "bool":
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=said)
        else:
            kind = int if field.type == "int" else float
            group.add_argument(option, type=kind, default=None, metavar="N", help=said)
    return parser


def _of(group: type[Model] | type[Plan], given: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(group)}
    return {name: value for name, value in given.items() if name in names}


def _table(result: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, value in result.items():
        rows = value if isinstance(value, dict) else {name: value}
        lines += [name] if isinstance(value, dict) else []
        lines += [f"  {row:<26}{number:>14,.2f}" if isinstance(number, float) else f"  {row:<26}{number:>14,}"
                  for row, number in rows.items()]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
