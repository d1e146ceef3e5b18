"""Tokens per second of the embedded engine on greedy chat prompts, beside transformers' `generate`, in one run.

Variants: transformers, the engine without drafts, with the DFlash chain, with draft trees of the automatic budget, and
with --sweep of fixed budgets. Each prompt is answered by every variant before the next prompt, so that the machine's
noise hits all alike. Time includes prefill. All engine variants share one loaded engine and differ in the plan that
turns drafts into trees; without a plan no draft is computed.

    python -m benchmarks.local_engine [--drafter DIR] [--sweep] [--tokens 128] [--prompts 12] [--repeats 2]

Prints a table and, on the last line, JSON. Does not measure HTTP: see serving_overhead.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_app.config import Config, SpeculationConfig, load_config
from serve_app.engines.base import GenerateRequest, SamplingParams
from serve_app.engines.local.engine import LocalEngine
from serve_app.engines.local.speculation import TreePlan
from serve_app.models import resolve

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me five tips for sleeping better.",
    "Write a short email asking a colleague to review a document.",
    "Explain what a hash table is and when to use one.",
    "Tell a short story about a lighthouse keeper and a storm.",
    "What is the difference between weather and climate?",
    "Summarise the causes of the First World War in a few sentences.",
    "List the steps to make a cup of tea.",
    "Solve 3x + 7 = 22 and show each step.",
    "Describe a sunset over the sea in three sentences.",
    "What are the advantages of a static type system?",
    "Write a SQL query that counts orders per customer.",
    "How do vaccines work?",
    "Suggest names for a small bakery and explain each.",
    "Translate 'good morning, how are you?' into French and Spanish.",
    "Write a haiku about winter.",
    "What should I see in Rome in two days?",
    "Explain recursion to a ten-year-old.",
    "Write a product description for a wooden desk lamp.",
    "What is compound interest? Give an example with numbers.",
    "Write a bash command that finds files larger than 100 MB.",
    "Compare cats and dogs as pets.",
    "How does a bicycle stay upright?",
]
SWEEP = (7, 11, 15, 23, 31, 47, 63)


@dataclass
class Tally:
    """What one variant did at one batch size. `steps`: verify steps, summed over requests."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    verified: int = 0
    steps: int = 0

    def summary(self) -> dict[str, float]:
        out = {"tokens_per_s": round(self.tokens / sum(self.seconds), 2), "tokens": self.tokens}
        if self.steps:
            out["acceptance_length"] = round(self.verified / self.steps, 3)
        return out


async def with_engine(
    engine: LocalEngine, plan: TreePlan | None, prompts: list[str], tokens: int, tally: Tally
) -> None:
    """Answer prompts together with the given plan."""
    assert engine._parts is not None
    engine._parts.stepper.plan = plan

    async def one(number: int, prompt: str) -> None:
        request = GenerateRequest(
            f"b{number}",
            SamplingParams(temperature=0, max_tokens=tokens),
            messages=[{"role": "user", "content": prompt}],
        )
        first = True
        async for chunk in engine.submit(request):
            tally.tokens += len(chunk.token_ids)
            if not first:
                tally.verified += len(chunk.token_ids)
                tally.steps += 1
            first = False

    began = time.perf_counter()
    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    tally.seconds.append(time.perf_counter() - began)


def with_transformers(model: Any, tokenizer: Any, prompts: list[str], tokens: int, tally: Tally) -> None:
    """The same with `generate`, one left-padded batch."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    began = time.perf_counter()
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    tally.seconds.append(time.perf_counter() - began)
    for row in out[:, inputs["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        tally.tokens += end


def plans(config: Config, block: int, device: torch.device, sweep: bool) -> dict[str, TreePlan | None]:
    def tree(**changes: Any) -> TreePlan:
        return TreePlan(SpeculationConfig(**{**config.speculation.model_dump(), **changes}), block, device)

    made: dict[str, TreePlan | None] = {"engine": None, "chain": tree(method="chain"), "ddtree": tree()}
    if sweep:
        made.update({f"ddtree-{budget}": tree(budget=budget) for budget in SWEEP})
    return made


def ratios(rates: dict[str, float]) -> dict[str, float]:
    pairs = {
        "engine / transformers": ("engine", "transformers"),
        "ddtree / engine": ("ddtree", "engine"),
        "ddtree / chain": ("ddtree", "chain"),
    }
    return {name: round(rates[a] / rates[b], 3) for name, (a, b) in pairs.items()}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"source": arguments.source, "drafter": arguments.drafter}}
    config = load_config(tree, use_env=False)
    engine = LocalEngine(config)
    await engine.start()
    parts = engine._parts
    assert parts is not None
    if parts.runner.drafter is None:
        raise SystemExit("no drafter: name one with --drafter")
    variants = plans(config, parts.runner.drafter.spec.block_size, parts.device, arguments.sweep)
    path = resolve(arguments.source).path
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_pretrained(path, dtype=parts.runner.target.dtype)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    result: dict[str, Any] = {"batch": {}}
    for batch in arguments.batches:
        prompts = PROMPTS[: arguments.prompts]
        groups = [prompts[at : at + batch] for at in range(0, len(prompts) - batch + 1, batch)]
        tallies = {name: Tally() for name in ("transformers", *variants)}
        for plan in variants.values():  # warm-up
            await with_engine(engine, plan, groups[0], 8, Tally())
        with_transformers(model, tokenizer, groups[0], 8, Tally())
        for group in tqdm(groups * arguments.repeats, desc=f"batch {batch}", disable=None):
            with_transformers(model, tokenizer, group, arguments.tokens, tallies["transformers"])
            for name, plan in variants.items():
                await with_engine(engine, plan, group, arguments.tokens, tallies[name])
        rows = {name: tally.summary() for name, tally in tallies.items()}
        rates = {name: row["tokens_per_s"] for name, row in rows.items()}
        result["batch"][batch] = {"variants": rows, "ratios": ratios(rates)}
    result["memory_mib"] = {
        "loaded": loaded // 1024,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    result["threads"], result["dtype"] = torch.get_num_threads(), str(parts.runner.target.dtype)
    await engine.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m", help="the target")
    parser.add_argument("--drafter", default="auto", help="the drafter; auto is the shipped one")
    parser.add_argument("--tokens", type=int, default=128, help="answer length at most")
    parser.add_argument("--prompts", type=int, default=12, help="how many of the prompts")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sweep", action="store_true", help="also fixed budgets")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    for batch, data in result["batch"].items():
        print(f"\nbatch {batch}")
        for name, row in data["variants"].items():
            length = row.get("acceptance_length")
            print(f"  {name:14} {row['tokens_per_s']:8.1f} tok/s" + (f"   acceptance {length:.2f}" if length else ""))
        for name, ratio in data["ratios"].items():
            print(f"  {name}: {ratio:.2f}")
    print(f"\nmemory, MiB: {result['memory_mib']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
