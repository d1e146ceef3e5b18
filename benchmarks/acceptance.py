"""Whether the engine commits what the evaluation predicts: acceptance lengths of both, over the same texts.

The engine answers held-out chat prompts, greedily, with the DFlash chain and with trees of 16 nodes. The evaluation's
code (`serve_app.models.eval.measure`) then scores each answer, token for token the same, and counts the steps that
serving should have made. In float32 the two must agree step for step; in bfloat16 the drafter's near-ties fall either
way, so texts agree only on average. With --own, the evaluation also answers the prompts itself, through transformers:
what is left then is the texts' own difference.

    python -m benchmarks.acceptance [--prompts 24] [--tokens 128] [--dtype bfloat16] [--batch 1] [--own]

Prints a table and, on the last line, JSON. Does not measure time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from tqdm import tqdm

from serve_app.config import SpeculationConfig, load_config
from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.engines.local.engine import LocalEngine
from serve_app.engines.local.speculation import TreePlan
from serve_app.models import eval as evaluation
from serve_app.models.acceptance import Tally

NODES = 16
KINDS = {"chain": "chain", "tree": f"tree {NODES}"}  # the engine's plan → the evaluation's name for it


async def served(engine: LocalEngine, items: list[Any], limit: int, tally: Tally) -> list[evaluation.Answer]:
    """The engine's answers to some prompts at once. Counts verify steps: every chunk but a choice's first is one."""

    async def one(number: int, item: Any) -> evaluation.Answer:
        request = GenerateRequest(
            f"a{number}", SamplingParams(temperature=0, max_tokens=limit), messages=item["messages"]
        )
        reply: list[int] = []
        async for chunk in engine.submit(request):
            tally.steps += bool(reply)
            tally.tokens += len(chunk.token_ids) if reply else 0
            reply += chunk.token_ids
        return evaluation.Answer(item["kind"], await engine.tokenize(request), reply)

    return list(await asyncio.gather(*(one(number, item) for number, item in enumerate(items))))


async def answers_of_engine(arguments: argparse.Namespace, items: list[Any]) -> tuple[dict[str, Any], dict[str, Tally]]:
    """Per plan the answers, in the prompts' order, and what the engine's steps committed."""
    source: dict[str, Any] = {"source": arguments.source, "drafter": arguments.drafter, "dtype": arguments.dtype}
    config = load_config({"model": source}, use_env=False)
    engine = LocalEngine(config)
    await engine.start()
    parts = engine._parts
    assert parts is not None and parts.runner.drafter is not None
    block = parts.runner.drafter.spec.block_size
    settings = {"chain": {"method": "chain"}, "tree": {"budget": NODES}}
    answers: dict[str, Any] = {kind: [] for kind in KINDS}
    tallies = {kind: Tally(block - 1) for kind in KINDS}
    for at in tqdm(range(0, len(items), arguments.batch), desc="engine", disable=None):
        for kind, changes in settings.items():
            speculation = SpeculationConfig(**{**config.speculation.model_dump(), **changes})
            parts.stepper.plan = TreePlan(speculation, block, parts.device)
            group = items[at : at + arguments.batch]
            answers[kind] += await served(engine, group, arguments.tokens, tallies[kind])
    await engine.stop()
    return answers, tallies


def evaluated(model: Any, drafter: Any, answers: list[evaluation.Answer]) -> dict[str, Tally]:
    """The evaluation's tallies over finished answers."""
    result = evaluation.Result()
    for item in tqdm(answers, desc="evaluation", disable=None):
        lengths = evaluation.measure(model, drafter, item, [NODES])
        result.add(item.kind, lengths, drafter.block_size - 1)
    return result.tallies


def own_answers(model: Any, items: list[Any], given: list[evaluation.Answer], limit: int) -> list[evaluation.Answer]:
    """What transformers answers to the same prompts."""
    ends = {model.generation_config.eos_token_id}
    return [
        evaluation.Answer(item["kind"], known.prompt, evaluation.answer(model, known.prompt, ends, 0.0, limit))
        for item, known in zip(tqdm(items, desc="transformers", disable=None), given, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m", help="the target")
    parser.add_argument("--drafter", default="auto", help="the drafter; auto is the shipped one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=24, help="how many of the evaluation's, evenly spread")
    parser.add_argument("--tokens", type=int, default=128, help="answer length at most")
    parser.add_argument("--batch", type=int, default=1, help="requests at once in the engine")
    parser.add_argument("--own", action="store_true", help="also the evaluation's own answers")
    arguments = parser.parse_args()
    everything = json.loads(evaluation.PROMPTS.read_text())
    items = everything[:: max(1, len(everything) // arguments.prompts)][: arguments.prompts]

    answers, tallies = asyncio.run(answers_of_engine(arguments, items))
    wanted = argparse.Namespace(
        model=arguments.source, drafter=[arguments.drafter], dtype=arguments.dtype, device="cpu"
    )
    model, _, drafters = evaluation.load(wanted)
    drafter = next(iter(drafters.values()))
    own = (
        evaluated(model, drafter, own_answers(model, items, answers["chain"], arguments.tokens))
        if arguments.own
        else {}
    )
    rows: dict[str, dict[str, float]] = {}
    for kind, name in KINDS.items():
        same = evaluated(model, drafter, answers[kind])[name]
        row = {"engine": tallies[kind].mean, "evaluation": same.mean, "ratio": tallies[kind].mean / same.mean}
        row |= {"steps_engine": tallies[kind].steps, "steps_evaluation": same.steps, "tokens": same.tokens}
        if own:
            row |= {"evaluation_own_text": own[name].mean}
        rows[name] = {key: round(value, 4) for key, value in row.items()}
        assert tallies[kind].tokens == same.tokens
        print(f"{name:8} " + "  ".join(f"{key} {value:g}" for key, value in rows[name].items()))
    same_texts = sum(a.reply == b.reply for a, b in zip(answers["chain"], answers["tree"], strict=True))
    print(f"{same_texts} of {len(items)} texts are the same with chain and tree")
    print(json.dumps({"prompts": len(items), "dtype": arguments.dtype, "batch": arguments.batch, "rows": rows}))


if __name__ == "__main__":
    main()
