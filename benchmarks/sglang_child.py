"""One SGLang engine in its own process, driven by JSON lines: requests on stdin, replies on stdout, logs on stderr.

Requests: {"do": "generate", "prompts": [...], "params": {...}, "logprobs": n?, "tokens": [...]?}, {"do": "time",
"prompts": [...], "params": {...}}, {"do": "traffic", …}, {"do": "profile", …}, {"do": "metrics"}, {"do": "pool"},
{"do": "stop"}. Every reply has "ok"; a failure has "error".

What this program does not do: choose modes or judge results (`sglang_fleet`, the tests and the benchmark do).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any


def take_stdout() -> Callable[..., None]:
    """What writes a reply, as a line of JSON, on what was stdout; whatever a library prints goes to the log."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")

    return reply


def main() -> None:
    reply = take_stdout()
    arguments = json.loads(sys.argv[1])
    began = time.monotonic()
    try:
        import sglang

        engine = sglang.Engine(**arguments)
    except BaseException:
        reply(ok=False, error=traceback.format_exc()[-4000:])
        raise
    reply(ok=True, start_s=round(time.monotonic() - began, 1))
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "stop":
            break
        try:
            reply(ok=True, **ACTIONS[request["do"]](engine, request))
        except Exception:
            reply(ok=False, error=traceback.format_exc()[-4000:])
    engine.shutdown()


def generate(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Token ids, finish reasons and verify steps of every prompt; if asked, logprobs of `logprobs` alternatives and,
    with them, of `tokens`."""
    top, tokens = request.get("logprobs"), request.get("tokens")
    asked = {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": -1} if top is not None else {}
    if tokens is not None:
        asked["token_ids_logprob"] = tokens
    prompts = request["prompts"]
    which = {"input_ids": prompts} if isinstance(prompts[0], list) else {"prompt": prompts}
    outputs = engine.generate(**which, sampling_params=request["params"], **asked)
    results = []
    for output in outputs:
        meta = output["meta_info"]
        kept = {"ids": output["output_ids"], "text": output.get("text"), "finish": meta["finish_reason"]}
        kept["prompt_tokens"], kept["cached"] = meta["prompt_tokens"], meta["cached_tokens"]
        kept["verify_steps"] = meta.get("spec_verify_ct", 0)
        if top is not None:
            kept["logprobs"] = [value for value, _, _ in meta["output_token_logprobs"]]
            kept["top"] = _pairs(meta["output_top_logprobs"] or [])
        if tokens is not None:
            kept["token_logprobs"] = _pairs(meta["output_token_ids_logprobs"])
        results.append(kept)
    return {"results": results}


def _pairs(rows: list[Any]) -> list[list[tuple[float, int]]]:
    """Log-prob and token id of every entry."""
    return [[(value, token) for value, token, _ in row] for row in rows]


def timed(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The prompts as one batch: seconds, tokens, verify steps."""
    began = time.perf_counter()
    outputs = generate(engine, request)["results"]
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens": sum(len(output["ids"]) for output in outputs),
        "verify_steps": sum(output["verify_steps"] for output in outputs),
        "longest_steps": max(output["verify_steps"] for output in outputs),
    }


def traffic(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Random requests from `workers` clients for `seconds`: greedy, sampled, constrained, some given up midway."""
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + request["seconds"]

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < deadline:
            name, params = _any_params(rng, request)
            ask = {
                "prompt": rng.choice(request["prompts"]),
                "sampling_params": params,
                "rid": f"{number}-{rng.random()}",
            }
            leaves = rng.randrange(12) if rng.random() < 0.25 else None
            counts[f"asked {name}"] += 1
            outputs, last = await engine.async_generate(**ask, stream=True), None
            try:
                async for part in outputs:
                    last = part
                    if leaves is not None:
                        leaves -= 1
                        if leaves < 0:
                            engine.tokenizer_manager.abort_request(ask["rid"])
                            leaves = None
                counts[last["meta_info"]["finish_reason"]["type"] if last else "nothing"] += 1
            except Exception as error:
                counts[f"{type(error).__name__}: {error}"[:200]] += 1

    async def everyone() -> None:
        await asyncio.gather(*(client(number) for number in range(request["workers"])))

    engine.loop.run_until_complete(everyone())
    return {"counts": counts}


def _any_params(rng: random.Random, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    kind = rng.choice(("greedy", "greedy", "sampled", "sampled", "json", "regex", "stop"))
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": rng.choice(request["lengths"])}
    if kind == "sampled":
        params |= {"temperature": rng.choice((0.3, 0.8, 1.2)), "top_p": rng.choice((1.0, 0.9))}
        params |= {"top_k": rng.choice((-1, 20)), "min_p": rng.choice((0.0, 0.05))}
    elif kind == "json":
        params["json_schema"] = request["schema"]
    elif kind == "regex":
        params["regex"] = request["regex"]
    elif kind == "stop":
        params["stop"] = [" the", "\n"]
    return kind, params


def profile(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A kernel trace of the prompts, once warm, as files in `folder`."""
    asked = {"prompts": request["prompts"], "params": request["params"]}
    generate(engine, asked)
    engine.start_profile(output_dir=request["folder"], activities=["GPU"], with_stack=False, record_shapes=False)
    generate(engine, asked)
    engine.stop_profile()
    return {}


def _registry() -> Any:
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry


def metrics(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The ddtree_* samples of all processes, summed by Prometheus's own merge."""
    samples = {}
    for family in _registry().collect():
        if family.name.startswith("ddtree_"):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model", "pid"))
                samples[f"{sample.name}{{{labels}}}"] = sample.value
    return {"metrics": samples}


def pool(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """KV tokens and memory (GB) as the scheduler reports them, after the prefix cache was dropped."""
    engine.flush_cache()
    time.sleep(0.5)
    generate(engine, {"prompts": [[1]], "params": {"temperature": 0.0, "max_new_tokens": 1}})
    time.sleep(0.5)
    gauges = ("sglang:kv_available_tokens", "sglang:kv_evictable_tokens", "sglang:kv_used_tokens")
    state: dict[str, Any] = {}
    for family in _registry().collect():
        if family.name in (*gauges, "sglang:max_total_num_tokens"):
            state[family.name] = max(sample.value for sample in family.samples)
    return {"state": state | engine.get_server_info()["internal_states"][0]["memory_usage"]}


ACTIONS = {
    "generate": generate,
    "time": timed,
    "traffic": traffic,
    "profile": profile,
    "metrics": metrics,
    "pool": pool,
}

if __name__ == "__main__":
    main()
