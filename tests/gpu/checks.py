"""What is asked of DDTREE's engines; each check returns plain numbers for `test_sglang_ddtree.py` to assert.

What this module does not do: start engines (`fleet`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from statistics import median
from typing import Any

from benchmarks.sglang_fleet import chat_prompts as prompts
from tests.gpu.fleet import GREEDY, Fleet

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
LAW_PROMPT = "The weather today is"
# Log-prob gap below which one rounding of the two best logits (8 to 32) decides: some steps of float16, of bfloat16.
NEAR_TIE = {"float16": 0.07, "bfloat16": 0.3}
REGEX = r"(red|green|blue)( and (red|green|blue)){3}"


def identity(fleet: Fleet, name: str, expected: list[dict[str, Any]], *, one_by_one: bool) -> dict[str, Any]:
    """All of AR's prompts through `name`."""
    asked = prompts(len(expected))
    found = fleet.greedy(name, asked, fleet.arguments.tokens, one_by_one=one_by_one)
    return fleet.compare(found, expected, asked)


def several_ranks(fleet: Fleet, name: str, reference: str, count: int) -> dict[str, Any]:
    """`count` prompts through both engines of several ranks."""
    asked = prompts(count)
    expected = fleet.greedy(reference, asked, fleet.arguments.tokens)
    found = fleet.greedy(name, asked, fleet.arguments.tokens)
    return fleet.compare(found, expected, asked, reference) | {"counters": counters(fleet, name)}


def graph_and_eager(fleet: Fleet, graph: str, eager: str, count: int, tokens: int) -> dict[str, Any]:
    """The same engine replaying and not, one prompt at a time, so that both forwards have the same shapes."""
    asked = prompts(count)
    replayed, launched = (fleet.greedy(name, asked, tokens, one_by_one=True) for name in (graph, eager))
    return fleet.compare(launched, replayed, asked)


def batch_sizes(fleet: Fleet, name: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Every batch size up to the largest captured, one more, and the most that may run."""
    asked, results = prompts(len(expected)), {}
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16):
        some = slice(size, 2 * size)
        found = fleet.greedy(name, asked[some], fleet.arguments.tokens)
        results[str(size)] = fleet.compare(found, expected[some], asked[some])
    return results


def logprobs(fleet: Fleet, name: str) -> dict[str, Any]:
    """Chosen tokens' and top-5 log-probs against AR's, on the common start of each answer."""
    asked, params = prompts(12), {**GREEDY, "max_new_tokens": 48}
    ours, theirs = (fleet.generate(engine, asked, params, logprobs=5) for engine in (name, "ar"))
    worst, worst_top, counted = 0.0, 0.0, 0
    for mine, other in zip(ours, theirs, strict=True):
        for i, (a, b) in enumerate(zip(mine["ids"], other["ids"], strict=False)):
            if a != b:
                break
            worst, counted = max(worst, abs(mine["logprobs"][i] - other["logprobs"][i])), counted + 1
            pairs = zip(mine["top"][i], other["top"][i], strict=True)
            worst_top = max(worst_top, *(abs(x[0] - y[0]) for x, y in pairs))
    counts = [(len(o["ids"]), len(o["logprobs"]), len(o["top"])) for o in ours]
    return {"largest": worst, "largest of top 5": worst_top, "tokens": counted, "counts": counts}


def limits(fleet: Fleet, name: str) -> dict[str, Any]:
    """Limits, stop strings and stop tokens that fall inside an accepted path: text and reason must be AR's.

    "every limit" cuts answers that end by themselves at many lengths around their ends, so that in some the end token
    and the limit fall into one block.
    """
    asked = prompts(24)
    exact = {}
    for tokens in (1, 2, 3, 7, 16, 33):
        found = fleet.generate(name, asked, {**GREEDY, "max_new_tokens": tokens, "ignore_eos": True})
        exact[str(tokens)] = sorted({len(output["ids"]) for output in found})
    stops: dict[str, Any] = {}
    for label, stop in (
        ("strings", {"stop": [" the", ". ", "ing a"]}),
        ("tokens", {"stop_token_ids": [28, 30]}),
        ("regex", {"stop_regex": ["[A-Z][a-z]+s "]}),
    ):
        params = {**GREEDY, "max_new_tokens": 96, **stop}
        ours, theirs = (fleet.generate(engine, asked, params) for engine in (name, "ar"))
        same = sum(a["text"] == b["text"] and a["finish"] == b["finish"] for a, b in zip(ours, theirs, strict=True))
        stops[label] = {"same": same, "of": len(asked), "stopped": sum(o["finish"]["type"] == "stop" for o in ours)}
    ending = [prompts(100)[number] for number in fleet.report["ending"]]
    every = [{**GREEDY, "max_new_tokens": limit} for limit in range(90, 128, 3)]
    pairs = [(prompt, params) for prompt in ending for params in every]
    ours, theirs = (fleet.generate(e, [p for p, _ in pairs], [q for _, q in pairs]) for e in (name, "ar"))
    return {"max_new_tokens": exact, "stops": stops, "every limit": fleet.compare(ours, theirs, [p for p, _ in pairs])}


def context_end(fleet: Fleet, name: str, context: int) -> dict[str, Any]:
    """Prompts that leave less than a tree, less than a block, or a few tokens of the context, of which SGLang answers
    with two less."""
    text = fleet.tokenizer.encode(" ".join(prompts(200)))
    text = (text * (context // len(text) + 1))[:context]
    rooms = [7, 8, 9, 15, 16, 17, 31, 33, 34, 60]  # SGLang takes no prompt that leaves fewer than seven
    asked = [text[: context - room] for room in rooms]
    params = [{**GREEDY, "max_new_tokens": room - 1, "ignore_eos": True} for room in rooms]
    ours, theirs = (
        [fleet.generate(engine, [p], one)[0] for p, one in zip(asked, params, strict=True)] for engine in (name, "ar")
    )
    return {
        "rooms": rooms,
        "lengths": [len(output["ids"]) for output in ours],
        **fleet.compare(ours, theirs, asked),
    }


def prefix_cache(fleet: Fleet, name: str) -> dict[str, Any]:
    """A second turn on top of a cached first one, and the same prompt again: AR's tokens both times."""
    first = prompts(60)[40:]
    answers = fleet.greedy("ar", first, 64)
    more = "<|im_end|>\n<|im_start|>user\nSay that again, shorter.<|im_end|>\n<|im_start|>assistant\n"
    second = [p + a["text"] + more for p, a in zip(first, answers, strict=True)]
    fleet.greedy(name, first, 64)
    found = [fleet.greedy(name, second, 64) for _ in range(2)]
    expected = fleet.greedy("ar", second, 64)
    cached = [min(output["cached"] for output in outputs) for outputs in found]
    return {"least cached": cached, "turns": [fleet.compare(outputs, expected, second) for outputs in found]}


def first_tokens(fleet: Fleet, names: tuple[str, ...]) -> dict[str, float]:
    """Median milliseconds to the first token of a prompt by itself, half of it cached, in each engine; in turns."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for prompt in prompts(180)[150:]:
        for name in names:
            began = time.perf_counter()
            fleet.greedy(name, [prompt], 1)
            taken[name].append(time.perf_counter() - began)
    return {name: round(1e3 * median(seconds), 2) for name, seconds in taken.items()}


def grammars(fleet: Fleet, name: str) -> dict[str, Any]:
    """Constrained answers: valid, and AR's."""
    result: dict[str, Any] = {}
    for label, field in (("json", {"json_schema": SCHEMA}), ("regex", {"regex": REGEX})):
        params = {**GREEDY, "max_new_tokens": 80, **field}
        asked = prompts(12)
        ours, theirs = (fleet.generate(engine, asked, params) for engine in (name, "ar"))
        result[label] = fleet.compare(ours, theirs, asked) | {"texts": [output["text"] for output in ours]}
    mixed = [{**GREEDY, "max_new_tokens": 40}, {**GREEDY, "max_new_tokens": 80, "regex": REGEX}] * 4
    asked = prompts(8)
    ours, theirs = (fleet.generate(engine, asked, mixed) for engine in (name, "ar"))
    result["mixed"] = fleet.compare(ours, theirs, asked)
    return result


def law(fleet: Fleet, name: str, samples: int) -> dict[str, Any]:
    """Counts of three-token continuations, sampled by AR and by `name`; greedy neighbours share every batch."""
    result = {}
    for label, params in (
        ("top-k", {"temperature": 1.0, "top_k": 3}),
        ("mixed", {"temperature": 1.3, "top_p": 0.6, "top_k": 5, "min_p": 0.05}),
    ):
        found = []
        for engine in ("ar", name):
            every = [{**params, "max_new_tokens": 3, "ignore_eos": True}] * samples
            every[::8] = [{**GREEDY, "max_new_tokens": 3, "ignore_eos": True}] * len(every[::8])
            outputs = fleet.generate(engine, [LAW_PROMPT] * samples, every)
            found.append([tuple(output["ids"]) for output in outputs])
        undecided = _undecided(fleet, {path[:depth] for paths in found for path in paths for depth in range(3)}, params)
        counts = [Counter(_decided(path, undecided) for i, path in enumerate(paths) if i % 8) for paths in found]
        result[label] = [
            {**{" ".join(map(str, path)): n for path, n in count.items()}, "greedy": len(set(paths[::8]))}
            for count, paths in zip(counts, found, strict=True)
        ]
    return result


def _undecided(fleet: Fleet, prefixes: set[tuple[int, ...]], params: dict[str, Any]) -> dict[tuple[int, ...], set[int]]:
    """Per prefix the tokens that one rounding moves into or out of the top k: there the law itself is not decided."""
    ordered, prompt = sorted(prefixes), fleet.tokenizer.encode(LAW_PROMPT)
    asked = [[*prompt, *prefix] for prefix in ordered]
    outputs = fleet.generate("ar", asked, {**GREEDY, "max_new_tokens": 1}, logprobs=20)
    edges = {}
    for prefix, output in zip(ordered, outputs, strict=True):
        top = output["top"][0]
        last, first_out = (top[params["top_k"] - 1 + i][0] for i in range(2))
        if last - first_out < NEAR_TIE["float16"]:
            middle = (last + first_out) / 2
            edges[prefix] = {token for value, token in top if abs(value - middle) < NEAR_TIE["float16"]}
    return edges


def _decided(path: tuple[int, ...], undecided: dict[tuple[int, ...], set[int]]) -> tuple[int | str, ...]:
    """`path` up to the first token that a rounding may have let in, which counts as any of its kind."""
    for depth, token in enumerate(path):
        if token in undecided.get(path[:depth], ()):
            return (*path[:depth], "any")
    return path


def traffic(fleet: Fleet, name: str, seconds: float, workers: int) -> dict[str, Any]:
    """Mixed requests of `workers` clients with aborts for a while, then what is left in the pools."""
    return left_behind(fleet, name, send_traffic(fleet, name, seconds, workers))


def send_traffic(
    fleet: Fleet, name: str, seconds: float, workers: int, lengths: tuple[int, ...] = (1, 5, 20, 60, 200)
) -> dict[str, Any]:
    """What became of the requests, and how many verify forwards they took. `lengths`: limits that answers are given.
    Asks the engine `name` alone, so that others can be asked meanwhile."""
    before = verify_steps(fleet, name)
    limit = max(min(seconds, fleet.left() - 25), 1)
    asked = {"prompts": prompts(100), "seconds": limit, "workers": workers, "schema": SCHEMA, "regex": REGEX}
    counts = fleet.child(name).ask("traffic", fleet.left(), **asked, lengths=lengths)["counts"]
    return {"counts": counts, "seconds": limit, "forwards": verify_steps(fleet, name) - before}


def left_behind(fleet: Fleet, name: str, sent: dict[str, Any]) -> dict[str, Any]:
    """What was sent, and then the fallbacks, the pools and some greedy answers."""
    counted = {key: value for key, value in counters(fleet, name).items() if "fallbacks" in key}
    after = fleet.greedy(name, prompts(4), 32)
    return {
        **sent,
        "fallbacks": counted,
        "pool": fleet.child(name).ask("pool", fleet.left())["state"],
        "afterwards": fleet.compare(after, fleet.greedy("ar", prompts(4), 32), prompts(4)),
    }


def verify_steps(fleet: Fleet, name: str) -> float:
    """Verify forwards so far, replayed or not."""
    wanted = ("ddtree_graph_replays_total", "ddtree_graph_fallbacks_total")
    counts = counters(fleet, name).items()
    return sum(value for key, value in counts if key.startswith(wanted) and "role=target" in key)


def counters(fleet: Fleet, name: str) -> dict[str, float]:
    """The engine's ddtree_* samples that are not zero."""
    samples = fleet.child(name).ask("metrics", fleet.left())["metrics"]
    return {key: value for key, value in samples.items() if value}


def mla(fleet: Fleet, name: str, reference: str) -> dict[str, Any]:
    """Random token prompts through latent attention, against the same engine without trees."""
    import torch

    generator = torch.Generator().manual_seed(5)
    lengths = [3 + 7 * (i % 9) for i in range(48)]
    asked = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in lengths]
    expected = fleet.greedy(reference, asked, 64)
    return fleet.compare(fleet.greedy(name, asked, 64), expected, asked, reference=reference)
